"""The demo sequencer of `demo` and `dsapp server`, which writes generated blocks to a stream.

Each operation is one batch with one block of one transaction, in the layouts of the stream
version. The content of a block depends only on the seed and its number: a stream written in
several runs equals one written in a single run.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Callable
from itertools import count
from typing import Any

from datastreamer.cli.shared.signals import StopRequest
from datastreamer.storage.stream import DataStream
from datastreamer.zkevm._rlp import rlp_bytes, rlp_list
from datastreamer.zkevm.schema import FIRST_PROTOBUF_VERSION
from datastreamer.zkevm.sequencer import Sequencer

_log = logging.getLogger(__name__)

VERSION = 1
SYSTEM_ID = 137

_FORK_ID = 9
_GENESIS = 1_700_000_000
_BLOCK_SECONDS = 2
# Interval between reports of the progress.
_LOG_SECONDS = 5.0


class DemoSequencer:
    """Writes blocks to a stream that is open for writing.

    Numbering continues from the last block of the stream; an open batch is resumed.
    """

    def __init__(self, stream: DataStream, seed: int = 0) -> None:
        self._seed = seed
        self._sequencer = Sequencer(stream, fork_id=_FORK_ID, atomic="batch")

    @property
    def entries_per_operation(self) -> int:
        """Number of entries of a batch with its block."""
        if self._sequencer.version < FIRST_PROTOBUF_VERSION:
            return 5
        return 6 + self._sequencer.state.block_ends

    @property
    def block(self) -> int:
        """The number of the next block."""
        newest = self._sequencer.state.block
        return 0 if newest is None else newest + 1

    def write(self) -> None:
        """Commit the next block as an atomic operation."""
        sequencer = self._sequencer
        batch = sequencer.resume() if sequencer.state.batch_open else sequencer.batch()
        number = self.block
        with batch, batch.block(number, **self._fields(number)) as block:
            block.tx(_transaction(self._seed, number))

    def _fields(self, block: int) -> dict[str, Any]:
        seed = self._seed
        return {
            "timestamp": _GENESIS + _BLOCK_SECONDS * block,
            "delta_timestamp": _BLOCK_SECONDS,
            "hash": _hash(seed, block, b"block"),
            "state_root": _hash(seed, block, b"state"),
            "l1_infotree_index": block // 100,
            "l1_blockhash": _hash(seed, block // 6, b"l1"),
            "global_exit_root": _hash(seed, block // 100, b"exit"),
            "coinbase": _hash(seed, 0, b"coinbase")[:20],
        }


def write_at_pace(
    sequencer: DemoSequencer,
    operations: int | None,
    pause: float,
    stop: StopRequest,
    *,
    fixed: bool,
    enough: Callable[[], bool] = lambda: False,
    quiet: Callable[[], bool] = lambda: False,
) -> int:
    """Write `operations` blocks (None: without a limit), or fewer if `stop` is set or `enough()`
    after a block; returns how many.

    `pause` is in seconds: after each block, or, if the rate is `fixed`, between the starts of
    two blocks. The progress is logged, but not while `quiet()`.
    """
    began = time.monotonic()
    logged = due = began
    for written in count() if operations is None else range(operations):
        if stop.is_set():
            return written
        if pause:
            due += pause
            if stop.wait(max(0.0, due - time.monotonic()) if fixed else pause):
                return written
        sequencer.write()
        if enough():
            return written + 1
        now = time.monotonic()
        if now - logged >= _LOG_SECONDS and not quiet():
            logged = now
            _log.info("%s", progress(sequencer, written + 1, operations, now - began))
    return operations or 0


def progress(sequencer: DemoSequencer, written: int, operations: int | None, seconds: float) -> str:
    """The progress, for people."""
    rate = f" ({written / seconds:,.0f} operations/s)" if seconds > 0 else ""
    entries = written * sequencer.entries_per_operation
    of = "" if operations is None else f" of {operations:,}"
    return f"{written:,}{of} operations, {entries:,} entries, in {seconds:.1f} s{rate}"


def _hash(seed: int, number: int, what: bytes) -> bytes:
    return hashlib.blake2b(b"%d %d" % (seed, number), digest_size=32, person=what).digest()


def _transaction(seed: int, block: int) -> bytes:
    """A legacy transaction in RLP, signed with random numbers: a list of 9 items."""
    noise = hashlib.shake_256(b"%d %d" % (seed, block)).digest(20 + 64 + 2 + 128)
    size = noise[84] & 0x7F
    return rlp_list(
        b"".join(
            [
                _rlp(block),
                _rlp(1_000_000_000 + noise[85]),
                _rlp(21_000 + 16 * size),
                _rlp(noise[:20]),
                _rlp(block * 1_000_000_007),
                _rlp(noise[86 : 86 + size]),
                _rlp(27 + (noise[85] & 1)),
                _rlp(int.from_bytes(noise[20:52], "big")),
                _rlp(int.from_bytes(noise[52:84], "big")),
            ]
        )
    )


def _rlp(item: int | bytes) -> bytes:
    if isinstance(item, int):
        item = item.to_bytes((item.bit_length() + 7) // 8, "big")
    return rlp_bytes(item)
