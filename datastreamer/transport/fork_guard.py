"""Guards objects of one process against use in a forked child.

Two processes that read one connection would each get some of its bytes; the bytes of two that write
to it would be mixed. Must not import trio.
"""

from __future__ import annotations

import os

from datastreamer.errors import UsageError


class ForkGuard:
    """An object that only the process that made it may use."""

    _called = "client"

    def __init__(self) -> None:
        self._process = os.getpid()

    @property
    def ours(self) -> bool:
        return os.getpid() == self._process

    def _ensure_ours(self) -> None:
        """Raises `UsageError` in a forked child."""
        if os.getpid() != self._process:
            raise UsageError(
                f"this {self._called} belongs to the parent process; create one in this process"
            )
