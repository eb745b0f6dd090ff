"""What belongs to one process: its copy in a forked child is not to be used.

Of two processes that read one connection each gets some of its bytes, from the middle of
entries; of two that write to it neither is understood. Must not import trio.
"""

from __future__ import annotations

import os

from datastreamer.errors import UsageError


class ForkGuard:
    """Made in one process, and used there."""

    _called = "client"

    def __init__(self) -> None:
        self._process = os.getpid()

    @property
    def _ours(self) -> bool:
        """Whether this is not the copy in a forked child."""
        return os.getpid() == self._process

    def _ensure_ours(self) -> None:
        """Raises `UsageError` in a forked child."""
        if not self._ours:
            raise UsageError(
                f"this {self._called} is of the process that was forked; make one in this process"
            )
