"""Writes a sequencer's events to a stream, in the order that readers expect.

Owns that order, the bookmarks and the numbers; the caller supplies the content of blocks. The same
calls write streams of all versions. Of a stream it knows only its atomic operations.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Final, Literal, Protocol

from datastreamer.errors import BadEvent, UsageError
from datastreamer.format import U32_MAX, U64_MAX
from datastreamer.zkevm import events, fixed
from datastreamer.zkevm.decoding import Event, encode
from datastreamer.zkevm.events import BatchType, BookMark, BookmarkType
from datastreamer.zkevm.latest_state import EntrySource, latest_state
from datastreamer.zkevm.schema import (
    FIRST_PROTOBUF_VERSION,
    TYPE_BOOK_MARK,
)
from datastreamer.zkevm.transactions import wrapped

Atomic = Literal["block", "batch", "caller"]

_NO_HASH: Final = bytes(32)
_NO_ADDRESS: Final = bytes(20)
_FULL_GAS_PRICE: Final = 255


class Stream(EntrySource, Protocol):
    """The methods of `datastreamer.DataStream`, open for writing, that are used here."""

    def start_atomic_op(self) -> None: ...
    def commit_atomic_op(self) -> object: ...
    def rollback_atomic_op(self) -> None: ...
    def add_entry(self, type: int, data: bytes, /) -> int: ...
    def add_bookmark(self, key: bytes, /) -> int: ...


class Sequencer:
    """Publishes batches and blocks to a stream that is open for writing::

        sequencer = Sequencer(stream, fork_id=9)
        with sequencer.batch() as batch:
            with batch.block(timestamp=..., hash=..., state_root=...) as block:
                block.tx(encoded, im_state_root=...)

    Numbers continue those of the stream. With ``atomic="block"`` each block is an atomic operation
    (a batch's first block includes the bookmark and BatchStart of the batch; BatchEnd is an
    operation of its own): readers receive a block as soon as it is written, and an interrupted
    batch stays open, see `resume`. With ``atomic="batch"`` the whole batch is one operation. With
    ``atomic="caller"`` the caller begins and commits operations.

    An exception inside a ``with`` discards the block, and with ``atomic="batch"`` the batch; what
    was committed before stays. A caller who rolls back an operation needs a new `Sequencer`.
    """

    def __init__(
        self,
        stream: Stream,
        *,
        fork_id: int = 9,
        chain_id: int | None = None,
        atomic: Atomic = "block",
    ) -> None:
        """`chain_id` defaults to the stream's system id. Raises `UsageError` for an unknown
        `atomic`."""
        if atomic not in ("block", "batch", "caller"):
            raise UsageError(f"atomic must be 'block', 'batch' or 'caller', not {atomic!r}")
        self.stream = stream
        self.version = stream.header.version
        self.fork_id = fork_id
        if chain_id is None:
            # Version 1 has 32 bits for a chain id.
            narrow = self.version < FIRST_PROTOBUF_VERSION
            chain_id = stream.header.system_id & (U32_MAX if narrow else U64_MAX)
        self.chain_id = chain_id
        self.atomic = atomic
        self.state = latest_state(stream)
        self._busy = False

    def batch(
        self,
        number: int | None = None,
        *,
        type: BatchType | int = BatchType.REGULAR,
        local_exit_root: bytes = _NO_HASH,
        debug: str | None = None,
    ) -> BatchWriter:
        """The next batch, as a context manager that begins and ends it.

        `number` defaults to the newest batch's plus one, or 0 in an empty stream.
        `local_exit_root` is for the batch's end and may be set on the batch until then. Raises
        `UsageError` if another batch is open.
        """
        if self._busy or self.state.batch_open:
            raise UsageError(
                f"batch {self.state.batch} has not ended: call resume() to continue it"
                if not self._busy
                else "a batch is being written: leave its with statement first"
            )
        if number is None:
            newest = self.state.batch
            number = 0 if newest is None else newest + 1
        start = events.BatchStart(number, type, self.fork_id, self.chain_id, debug)
        return BatchWriter(self, number, start, local_exit_root)

    def resume(self, *, local_exit_root: bytes = _NO_HASH) -> BatchWriter:
        """The open batch at the end of the stream; nothing is written when it begins.

        Raises `UsageError` if the stream's last batch has ended, or there is none.
        """
        if self._busy or not self.state.batch_open:
            raise UsageError(
                "the stream does not end in an open batch: call batch() to begin the next one"
            )
        assert self.state.batch is not None
        return BatchWriter(self, self.state.batch, None, local_exit_root)

    def update_ger(
        self,
        *,
        timestamp: int,
        global_exit_root: bytes,
        state_root: bytes,
        coinbase: bytes = _NO_ADDRESS,
        batch_number: int | None = None,
        debug: str | None = None,
    ) -> None:
        """Write an UpdateGER between blocks: as an operation of its own, or in the open operation
        of the batch or the caller. `batch_number` defaults to the newest batch's.
        """
        number = (self.state.batch or 0) if batch_number is None else batch_number
        common = (number, timestamp, global_exit_root, coinbase, self.fork_id, self.chain_id)
        event: Event
        if self.version < FIRST_PROTOBUF_VERSION:
            event = fixed.FixedUpdateGER(*common, state_root)
        else:
            event = events.UpdateGER(*common, state_root, debug)
        alone = self.atomic == "block" or (self.atomic == "batch" and not self._busy)
        self._write([event], committing=alone)

    def _write(self, found: Iterable[Event], *, committing: bool) -> None:
        """Add events to the open operation, or as one; nothing if one of them cannot be encoded."""
        packed = [encode(event, version=self.version) for event in found]
        if committing:
            self.stream.start_atomic_op()
        try:
            for kind, data in packed:
                if kind == TYPE_BOOK_MARK:
                    self.stream.add_bookmark(data)
                else:
                    self.stream.add_entry(kind, data)
        except BaseException:
            if committing:
                self.stream.rollback_atomic_op()
            raise
        if committing:
            self.stream.commit_atomic_op()


class BatchWriter:
    """Writes a batch; a context manager that `Sequencer.batch` makes."""

    def __init__(
        self,
        sequencer: Sequencer,
        number: int,
        start: events.BatchStart | None,
        local_exit_root: bytes,
    ) -> None:
        self.sequencer = sequencer
        self.number = number
        self.local_exit_root = local_exit_root
        # The state root of its end; the last block's if it is not set.
        self.state_root: bytes | None = None
        self._start = start
        self._previous = sequencer.state
        # Whether its with statement is entered, and the block that is being written.
        self._open = False
        self._block: BlockWriter | None = None

    def __enter__(self) -> BatchWriter:
        sequencer = self.sequencer
        if sequencer._busy:
            raise UsageError("a batch is being written: leave its with statement first")
        if sequencer.state is not self._previous:
            raise UsageError(
                f"the stream has grown since batch {self.number} was made: make another one"
            )
        self._open = sequencer._busy = True
        if sequencer.atomic == "batch":
            try:
                sequencer.stream.start_atomic_op()
            except BaseException:
                self._open = sequencer._busy = False
                raise
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        sequencer = self.sequencer
        self._open = sequencer._busy = False
        atomic = sequencer.atomic == "batch"
        try:
            if kind is None:
                self._end()
        except BaseException:
            self._roll_back(atomic)
            raise
        if kind is not None:
            self._roll_back(atomic)
        elif atomic:
            sequencer.stream.commit_atomic_op()

    def _roll_back(self, atomic: bool) -> None:
        if atomic:
            self.sequencer.state = self._previous
            self.sequencer.stream.rollback_atomic_op()

    def _end(self) -> None:
        sequencer, found = self.sequencer, list(self._beginning())
        if sequencer.version >= FIRST_PROTOBUF_VERSION:
            state = sequencer.state
            root = state.state_root if self.state_root is None else self.state_root
            found.append(events.BatchEnd(self.number, self.local_exit_root, root))
        sequencer._write(found, committing=sequencer.atomic == "block" and bool(found))
        self._written(batch_open=False)

    def _beginning(self) -> Iterator[Event]:
        """The events that begin the batch, unless they have been written."""
        if self._start is not None:
            yield BookMark(BookmarkType.BATCH, self.number)
            if self.sequencer.version >= FIRST_PROTOBUF_VERSION:
                yield self._start

    def _written(self, **changes: Any) -> None:
        self._start = None
        self.sequencer.state = self.sequencer.state._replace(batch=self.number, **changes)

    def block(
        self,
        number: int | None = None,
        *,
        timestamp: int,
        hash: bytes = _NO_HASH,
        state_root: bytes = _NO_HASH,
        delta_timestamp: int | None = None,
        min_timestamp: int = 0,
        l1_blockhash: bytes = _NO_HASH,
        l1_infotree_index: int = 0,
        global_exit_root: bytes = _NO_HASH,
        coinbase: bytes = _NO_ADDRESS,
        block_gas_limit: int = 0,
        block_info_root: bytes = b"",
        debug: str | None = None,
        base_fee: bytes = b"",
    ) -> BlockWriter:
        """The next block, as a context manager; leaving it writes the block.

        `number` defaults to the newest block's plus one, `delta_timestamp` to the time since that
        block. Version 1 has no `min_timestamp`, `block_gas_limit`, `block_info_root`, `debug` and
        `base_fee`.
        """
        state = self.sequencer.state
        if number is None:
            number = 0 if state.block is None else state.block + 1
        if delta_timestamp is None:
            passed = 0 if state.block is None else timestamp - state.timestamp
            if passed < 0:
                raise BadEvent(
                    f"block {number} has the time {timestamp}, before that of block {state.block}, "
                    f"{state.timestamp}"
                )
            delta_timestamp = passed
        return BlockWriter(
            self,
            events.L2Block(
                number,
                self.number,
                timestamp,
                delta_timestamp,
                min_timestamp,
                l1_blockhash,
                l1_infotree_index,
                hash,
                state_root,
                global_exit_root,
                coinbase,
                block_gas_limit,
                block_info_root,
                debug,
                base_fee,
            ),
        )


class BlockWriter:
    """Writes a block; a context manager that `BatchWriter.block` makes."""

    def __init__(self, batch: BatchWriter, block: events.L2Block) -> None:
        self.number = block.number
        self._batch = batch
        self._block = block
        self._previous = batch.sequencer.state
        self._transactions: list[events.Transaction] = []

    def __enter__(self) -> BlockWriter:
        batch = self._batch
        if not batch._open:
            raise UsageError(
                f"batch {batch.number} is not being written: enter its with statement first"
            )
        if batch._block is not None:
            raise UsageError(f"block {batch._block.number} is being written: leave its with first")
        if batch.sequencer.state is not self._previous:
            raise UsageError(
                f"the stream has grown since block {self.number} was made: make another one"
            )
        batch._block = self
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        batch, block = self._batch, self._block
        batch._block = None
        if kind is not None:
            return
        sequencer = batch.sequencer
        found = [*batch._beginning(), BookMark(BookmarkType.L2_BLOCK, self.number)]
        is_fixed = sequencer.version < FIRST_PROTOBUF_VERSION
        found += self._fixed() if is_fixed else [block, *self._transactions]
        if not is_fixed and sequencer.state.block_ends:
            found.append(events.L2BlockEnd(self.number))
        sequencer._write(found, committing=sequencer.atomic == "block")
        batch._written(
            batch_open=not is_fixed,
            block=self.number,
            timestamp=block.timestamp,
            state_root=block.state_root,
        )

    def tx(
        self,
        encoded: bytes,
        *,
        is_valid: bool = True,
        effective_gas_price_percentage: int = _FULL_GAS_PRICE,
        im_state_root: bytes | None = None,
        debug: str | None = None,
    ) -> None:
        """Add a transaction. `encoded` is its Ethereum encoding; one with a type is written in the
        RLP string that nodes expect. `im_state_root`, the state root after it, defaults to the
        block's. Raises `UsageError` outside of the block's ``with``."""
        if self._batch._block is not self:
            raise UsageError(
                f"block {self.number} is not being written: enter its with statement first"
            )
        root = self._block.state_root if im_state_root is None else im_state_root
        index = len(self._transactions)
        self._transactions.append(
            events.Transaction(
                self.number,
                index,
                is_valid,
                wrapped(encoded),
                effective_gas_price_percentage,
                root,
                debug,
            )
        )

    def _fixed(self) -> Iterator[Event]:
        block, sequencer = self._block, self._batch.sequencer
        yield fixed.StartL2Block(
            block.batch_number,
            block.number,
            block.timestamp,
            block.delta_timestamp,
            block.l1_infotree_index,
            block.l1_blockhash,
            block.global_exit_root,
            block.coinbase,
            sequencer.fork_id,
            sequencer.chain_id,
        )
        for tx in self._transactions:
            percentage = tx.effective_gas_price_percentage
            yield fixed.L2Tx(percentage, tx.is_valid, tx.im_state_root, tx.encoded)
        yield fixed.EndL2Block(block.number, block.hash, block.state_root)
