"""Operations at a pace, told about as they go: what `demo` and `dsapp server` have in common."""

from __future__ import annotations

import logging
import time

from datastreamer.cli.demo.sequencer import DemoSequencer
from datastreamer.cli.shared.signals import StopRequest

_log = logging.getLogger(__name__)

_TELL_SECONDS = 5.0


def write_at_pace(
    sequencer: DemoSequencer, operations: int, pause: float, ending: StopRequest, *, fixed: bool
) -> int:
    """Write `operations` blocks, or as many until `ending` is set; gives how many.

    `pause` is in seconds: after each block, or from one block's beginning to the next's
    where the rate is `fixed`. Tells of the progress in the log.
    """
    began = time.monotonic()
    told = due = began
    for written in range(operations):
        if ending.is_set():
            return written
        if pause:
            due += pause
            if ending.wait(max(0.0, due - time.monotonic()) if fixed else pause):
                return written
        sequencer.write()
        now = time.monotonic()
        if now - told >= _TELL_SECONDS:
            told = now
            _log.info("%s", progress(sequencer, written + 1, operations, now - began))
    return operations


def progress(sequencer: DemoSequencer, written: int, operations: int, seconds: float) -> str:
    """How far it is, for people."""
    rate = f" ({written / seconds:,.0f} a second)" if seconds > 0 else ""
    entries = written * sequencer.entries_per_operation
    return (
        f"{written:,} of {operations:,} operations, {entries:,} entries, in {seconds:.1f} s{rate}"
    )
