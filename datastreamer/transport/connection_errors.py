"""A server that cannot be reached, or is gone: the words for it, the same for every client,
and the system's own watch over a connection.

Knows neither trio nor what is said on a connection.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
from collections.abc import Callable

from datastreamer.errors import ConnectFailed, ConnectionLost, NoAnswer, PeerError, UsageError
from datastreamer.protocol.arguments import is_number


def check_port(port: int) -> None:
    """Raises `UsageError` for a number that is no port to connect to."""
    if not is_number(port, 1, 65535):
        raise UsageError(f"ports to connect to run from 1 to 65535, not {port!r}")


def connect_failed(peer: str, error: OSError | UnicodeError) -> ConnectFailed:
    """The exception for a connection that could not be made, or a name that no host can have."""
    return ConnectFailed(f"cannot connect to {peer}: {_reason(error)}; is a server running there?")


def connect_timeout(peer: str, timeout: float) -> ConnectFailed:
    """The exception for a connection that was not made in time."""
    return ConnectFailed(f"cannot connect to {peer}: no answer within {timeout:g} s")


def answer_timeout(peer: str, timeout: float) -> NoAnswer:
    """The exception for an answer that did not come in time."""
    return NoAnswer(f"no answer from {peer} within {timeout:g} s")


def connection_lost(peer: str, error: Exception) -> PeerError:
    """The exception for a connection that broke.

    Whether a server takes a client's certificate shows only when its answer is read.
    """
    inner: BaseException = error
    while inner.__cause__ is not None:
        inner = inner.__cause__
    if "_ALERT_" in (getattr(inner, "reason", None) or ""):
        from datastreamer.transport.tls import tls_failed

        return tls_failed(peer, inner)
    why = _reason(error)
    return ConnectionLost(f"the connection to {peer} is lost: {why}; connect again to go on")


def closed_here(peer: str) -> ConnectionLost:
    """The exception for a connection that this side closed while it was waited for."""
    return ConnectionLost(f"the connection to {peer} was closed here")


def silent_server(peer: str, seconds: float, error: PeerError) -> ConnectionLost:
    """The exception for a server that sends nothing and does not answer a second connection."""
    kind = NoAnswer if isinstance(error, NoAnswer) else ConnectionLost
    return kind(f"nothing from {peer} for {seconds:g} s, and {error}")


def silent_twice(peer: str, seconds: float, timeout: float) -> NoAnswer:
    """The exception for a server that is silent, and on another connection too."""
    return NoAnswer(
        f"nothing from {peer} for {seconds:g} s, and no answer on another connection within "
        f"{timeout:g} s"
    )


def host_silent(peer: str, seconds: float) -> NoAnswer:
    """The exception for a server whose host does not confirm what was sent to it."""
    return NoAnswer(f"the host of {peer} has not answered for {seconds:.0f} s")


def say_lost(log: logging.Logger, peer: str, error: PeerError) -> None:
    """A line in the log when a server is lost, and none for each attempt after."""
    log.warning("lost %s, trying again: %s", peer, str(error).partition(";")[0])


def say_back(log: logging.Logger, peer: str, number: int | None) -> None:
    """A line in the log when it is back."""
    if number is None:
        log.warning("%s is back", peer)
    else:
        log.warning("%s is back, going on from entry %d", peer, number)


# A host that is gone shows after a minute and a half, not after the system's two hours.
_KEEPALIVE = (("TCP_KEEPIDLE", 30), ("TCP_KEEPINTVL", 15), ("TCP_KEEPCNT", 4))


def watch_over(set_option: Callable[[int, int, int], object]) -> None:
    """Have the system ask a quiet server's host whether it is there.

    `set_option` is the `setsockopt` of the connection.
    """
    with contextlib.suppress(OSError):
        set_option(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in _KEEPALIVE:
            if hasattr(socket, name):
                set_option(socket.IPPROTO_TCP, getattr(socket, name), value)


def _reason(error: BaseException) -> str:
    """What the system says, without its numbers."""
    while error.__cause__ is not None:
        error = error.__cause__
    # trio tells of all addresses that it tried.
    error = next(iter(getattr(error, "exceptions", ())), error)
    # OpenSSL's errors have numbers of their own.
    openssl = getattr(error, "reason", None)
    if isinstance(openssl, str) and isinstance(error, OSError):
        return f"TLS: {openssl.lower().replace('_', ' ')}"
    number = error.errno if isinstance(error, OSError) else None
    if number is not None and number > 0:
        return os.strerror(number)
    return getattr(error, "strerror", None) or str(error) or type(error).__name__
