"""What the system knows of a TCP connection, and the options that let it find out.

Owns the numbers of `struct tcp_info` and of keepalive. Descriptors that are no TCP
sockets, and systems that say nothing, are no error: nothing is known of them.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import sys
from typing import NamedTuple

# A connection on which nothing is under way is asked after so many seconds whether its
# host is there, then every so many more, so often. (With data under way the system asks
# by itself; TCP_USER_TIMEOUT would end living hosts whose programs read nothing.)
_KEEPALIVE_IDLE = 60
_KEEPALIVE_INTERVAL = 15
_KEEPALIVE_PROBES = 4

# struct tcp_info, linux/tcp.h: retransmits and probes are the third and fourth byte;
# unacked, last_ack_recv and bytes_acked stand at these offsets; so many bytes are needed.
_UNACKED, _LAST_ACK_RECEIVED, _BYTES_ACKED, _NOTSENT, _INFO_SIZE = 24, 56, 120, 144, 148
# Questions in a row that a host has left unanswered. One or two may be lost, or on their way.
_UNANSWERED = 3


class TcpInfo(NamedTuple):
    """What matters here of a connection's state."""

    unanswered: int
    """Retransmissions, or probes of a closed window, in a row without an answer."""

    silent_seconds: float
    """Since the host confirmed anything."""

    acknowledged: int
    """Bytes that the host has confirmed in all."""

    outstanding: bool
    """Whether there are bytes that it has not confirmed."""

    def dead_for(self, seconds: float) -> bool:
        """Whether its host has left us without an answer for so long, asked again and again.

        A host whose program reads nothing answers each probe, minutes apart in the end.
        """
        return (
            self.outstanding and self.silent_seconds >= seconds and self.unanswered >= _UNANSWERED
        )


def keep_alive(connection: socket.socket) -> None:
    """Have the system notice a host that is gone while nothing is under way."""
    idle = getattr(socket, "TCP_KEEPIDLE", None) or getattr(socket, "TCP_KEEPALIVE", None)
    for level, option, value in (
        (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
        (socket.IPPROTO_TCP, idle, _KEEPALIVE_IDLE),
        (socket.IPPROTO_TCP, getattr(socket, "TCP_KEEPINTVL", None), _KEEPALIVE_INTERVAL),
        (socket.IPPROTO_TCP, getattr(socket, "TCP_KEEPCNT", None), _KEEPALIVE_PROBES),
    ):
        if option is not None:
            with contextlib.suppress(OSError):
                connection.setsockopt(level, option, value)


def tcp_info(connection: socket.socket) -> TcpInfo | None:
    """What the system knows; None where it says nothing, or the socket is closed."""
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
