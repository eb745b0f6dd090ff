"""Ports for programs that must be told one."""

from __future__ import annotations

import random
import socket

# Below those that systems give to connections of their own (from 32768 on, or from 49152).
_FIRST, _STOP = 15_000, 32_000


def free_port() -> int:
    """A TCP port on which nobody listens, and which no connection is given by chance."""
    while True:
        port = random.randrange(_FIRST, _STOP)
        try:
            with socket.create_server(("", port)):
                return port
        except OSError:
            continue
