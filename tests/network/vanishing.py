"""A dead host, as the system at the other end sees it."""

from __future__ import annotations

import ctypes
import socket
import struct
import sys

import pytest
import trio

linux = pytest.mark.skipif(sys.platform != "linux", reason="TCP_INFO is Linux's")
_SO_ATTACH_FILTER = 26


def vanish(connection: socket.socket | trio.socket.SocketType) -> None:
    """From now on the system drops all that comes to this socket, as if its host had vanished."""
    drop_all = ctypes.create_string_buffer(struct.pack("=HBBI", 0x06, 0, 0, 0))
    program = struct.pack("HxxxxxxP", 1, ctypes.addressof(drop_all))
    connection.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, program)
