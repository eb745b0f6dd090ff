"""Ports for programs that need a fixed one."""

from __future__ import annotations

import random
import socket

# Below the ephemeral ports, which start at 32768 or 49152.
_FIRST, _STOP = 15_000, 32_000


def free_port() -> int:
    """A TCP port without a listener that the system assigns to no connection."""
    while True:
        port = random.randrange(_FIRST, _STOP)
        try:
            with socket.create_server(("", port)):
                return port
        except OSError:
            continue
