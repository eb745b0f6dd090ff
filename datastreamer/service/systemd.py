"""systemd: readiness, shutdown, watchdog and socket activation.

Owns the protocols of sd_notify(3), sd_watchdog_enabled(3) and sd_listen_fds(3), which are
environment variables and datagrams: no library is needed. If systemd did not start the process,
nothing happens. Synchronous; knows nothing of streams.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import socket
from typing import Final

from datastreamer.errors import ListenFailed

_log = logging.getLogger(__name__)

READY: Final = "READY=1"
STOPPING: Final = "STOPPING=1"
WATCHDOG: Final = "WATCHDOG=1"

# The first descriptor that systemd passes, sd_listen_fds(3).
_FIRST_DESCRIPTOR = 3


def manager() -> str:
    """The address of the service manager that started this process; "" without one."""
    name = os.environ.get("NOTIFY_SOCKET", "")
    return name if name.startswith(("/", "@")) else ""


def notify(state: str) -> None:
    """Send a state to the service manager, if there is one."""
    name = manager()
    if not name:
        return
    address = "\0" + name[1:] if name.startswith("@") else name
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as link:
            # Never wait for a manager that does not read.
            link.setblocking(False)
            link.sendto(state.encode(), address)
    except OSError as error:
        _log.debug("cannot notify the service manager at %s: %s", name, error.strerror or error)


def watchdog_seconds() -> float | None:
    """The interval of watchdog notifications, half of the manager's timeout; None: no watchdog."""
    micros, process = os.environ.get("WATCHDOG_USEC", ""), os.environ.get("WATCHDOG_PID", "")
    if not micros.isdecimal() or not int(micros) or process not in ("", str(os.getpid())):
        return None
    return int(micros) / 2_000_000


def take_listeners() -> list[socket.socket]:
    """The listening sockets that systemd opened for this process; empty without any.

    The variables are removed, so that no child process uses the sockets again. Raises
    `ListenFailed` for a descriptor that is not a listening stream socket.
    """
    process = os.environ.pop("LISTEN_PID", "")
    count = os.environ.pop("LISTEN_FDS", "")
    names = os.environ.pop("LISTEN_FDNAMES", "").split(":")
    if process != str(os.getpid()) or not count.isdecimal():
        return []
    listeners: list[socket.socket] = []
    try:
        for at in range(int(count)):
            name = names[at] if at < len(names) and names[at] else "unknown"
            listeners.append(_listener(_FIRST_DESCRIPTOR + at, name))
    except ListenFailed:
        for listener in listeners:
            listener.close()
        raise
    return listeners


def _listener(fd: int, name: str) -> socket.socket:
    trouble = (
        f"descriptor {fd} ({name}), passed by systemd, is not a listening stream socket; "
        f"set ListenStream= and Accept=no in the socket unit"
    )
    try:
        flags = fcntl.fcntl(fd, fcntl.F_GETFD)
        fcntl.fcntl(fd, fcntl.F_SETFD, flags | fcntl.FD_CLOEXEC)
        listener = socket.socket(fileno=fd)
    except OSError:
        raise ListenFailed(trouble) from None
    listening = 0
    with contextlib.suppress(OSError):
        if listener.type == socket.SOCK_STREAM:
            listening = listener.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
    if not listening:
        listener.detach()  # not ours to close
        raise ListenFailed(trouble)
    listener.setblocking(False)
    return listener
