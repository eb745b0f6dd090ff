"""Operations at a given rate, with progress in the log: shared by `demo` and `dsapp server`."""

from __future__ import annotations

import logging
import time

from datastreamer.cli.demo.sequencer import DemoSequencer
from datastreamer.cli.shared.signals import StopRequest

_log = logging.getLogger(__name__)

_LOG_SECONDS = 5.0


def write_at_pace(
    sequencer: DemoSequencer, operations: int, pause: float, stop: StopRequest, *, fixed: bool
) -> int:
    """Write `operations` blocks, or fewer if `stop` is set; returns how many.

    `pause` is in seconds: after each block, or, if the rate is `fixed`, between the starts of
    two blocks.
    """
    began = time.monotonic()
    logged = due = began
    for written in range(operations):
        if stop.is_set():
            return written
        if pause:
            due += pause
            if stop.wait(max(0.0, due - time.monotonic()) if fixed else pause):
                return written
        sequencer.write()
        now = time.monotonic()
        if now - logged >= _LOG_SECONDS:
            logged = now
            _log.info("%s", progress(sequencer, written + 1, operations, now - began))
    return operations


def progress(sequencer: DemoSequencer, written: int, operations: int, seconds: float) -> str:
    """The progress, for people."""
    rate = f" ({written / seconds:,.0f} operations/s)" if seconds > 0 else ""
    entries = written * sequencer.entries_per_operation
    return (
        f"{written:,} of {operations:,} operations, {entries:,} entries, in {seconds:.1f} s{rate}"
    )
