"""The kernel's information on a TCP connection, and keepalive.

Owns the layout of `struct tcp_info` and the numbers of keepalive. For descriptors that are not TCP
sockets, and on systems without the information, there is none; that is not an error.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import sys
from collections.abc import Callable
from typing import Final, NamedTuple

# Keepalive probes of an idle connection: first after this many seconds, then at this interval, this
# many times. (With unacknowledged data the kernel retransmits; TCP_USER_TIMEOUT would close
# connections to living hosts whose programs read nothing.)
SERVER_KEEPALIVE: Final = (60, 15, 4)
CLIENT_KEEPALIVE: Final = (30, 15, 4)

# struct tcp_info, linux/tcp.h: retransmits and probes are the third and fourth byte; these are the
# offsets of unacked, last_ack_recv, bytes_acked and notsent_bytes, and the size that is needed.
_UNACKED, _LAST_ACK_RECEIVED, _BYTES_ACKED, _NOTSENT, _INFO_SIZE = 24, 56, 120, 144, 148
# Unanswered probes in a row that mean a dead host. One or two may be lost, or on their way.
_UNANSWERED = 3


class TcpInfo(NamedTuple):
    """The state of a connection."""

    unanswered: int
    """Retransmissions, or probes of a closed window, in a row without an answer."""

    silent_seconds: float
    """Seconds since the last acknowledgement."""

    acknowledged: int
    """Bytes that the host has acknowledged in all."""

    outstanding: bool
    """Whether there are unacknowledged bytes."""

    def dead_for(self, seconds: float) -> bool:
        """Whether the host has answered none of several probes for `seconds` seconds.

        A host whose program reads nothing answers each probe; these are minutes apart in the end.
        """
        return (
            self.outstanding and self.silent_seconds >= seconds and self.unanswered >= _UNANSWERED
        )


def keep_alive(
    set_option: Callable[[int, int, int], object], numbers: tuple[int, int, int]
) -> None:
    """Set keepalive, so that the kernel notices a dead host on an idle connection. `set_option` is
    the `setsockopt` of the connection."""
    idle = "TCP_KEEPIDLE" if hasattr(socket, "TCP_KEEPIDLE") else "TCP_KEEPALIVE"
    with contextlib.suppress(OSError):
        set_option(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in zip((idle, "TCP_KEEPINTVL", "TCP_KEEPCNT"), numbers, strict=True):
            if hasattr(socket, name):
                set_option(socket.IPPROTO_TCP, getattr(socket, name), value)


def tcp_info(connection: socket.socket) -> TcpInfo | None:
    """The kernel's information; None if there is none, or the socket is closed."""
    if sys.platform != "linux":
        return None
    try:
        packed = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO_SIZE)
    except OSError:
        return None
    if len(packed) < _INFO_SIZE:
        return None
    unacked, silent, notsent = (
        struct.unpack_from("=I", packed, at)[0] for at in (_UNACKED, _LAST_ACK_RECEIVED, _NOTSENT)
    )
    (acknowledged,) = struct.unpack_from("=Q", packed, _BYTES_ACKED)
    return TcpInfo(packed[2] + packed[3], silent / 1000, acknowledged, bool(unacked or notsent))
