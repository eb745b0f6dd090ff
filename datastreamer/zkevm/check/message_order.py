"""The order of the events in streams of version 2 and later.

The bookmark of a batch, BatchStart, then for each block its bookmark, L2Block, its Transactions
and L2BlockEnd (from version 3 on, or once the stream has one), then BatchEnd. UpdateGER comes
between blocks.
"""

from __future__ import annotations

import itertools
from typing import NamedTuple

from datastreamer.errors import ExtraMissing
from datastreamer.zkevm import events
from datastreamer.zkevm.check.order import Order, PreviousBlock, ReportBreach, as_hex
from datastreamer.zkevm.check.parent_hashes import ParentCheck
from datastreamer.zkevm.events import BookmarkType
from datastreamer.zkevm.schema import FIRST_BLOCK_END_VERSION
from datastreamer.zkevm.transactions import keccak


class _Block(NamedTuple):
    """The open block: its entry, its event, and the hash of the previous block if known."""

    entry: int
    event: events.L2Block
    parent: bytes

    @property
    def number(self) -> int:
        return self.event.number


class MessageOrder(Order):
    """Checks the order of version 2 and later; parents only with the extra ``zkevm``."""

    def __init__(self, report: ReportBreach, version: int) -> None:
        super().__init__(report)
        self._batch: int | None = None
        self._batch_root = b""
        self._fork = 0
        self._block: _Block | None = None
        self._ends = version >= FIRST_BLOCK_END_VERSION
        # The number of transactions of the block; and while all have index 0, their entries as
        # ranges: if another index follows, these are out of order.
        self._transactions = 0
        self._zeros: list[range] = []
        self._unnumbered = 0
        self._unended = 0
        self._parents: ParentCheck | None = None
        self._no_parents = ""
        try:
            self._parents = ParentCheck(keccak())
        except ExtraMissing as error:
            self._no_parents = f"parents are not checked: {error}"
        self.on |= {
            events.BatchStart: self._batch_start,
            events.L2Block: self._l2_block,
            events.Transaction: self._transaction,
            events.L2BlockEnd: self._l2_block_end,
            events.BatchEnd: self._batch_end,
            events.UpdateGER: self._update_ger,
        }

    @property
    def parents(self) -> int:
        return self._parents.checked if self._parents is not None else 0

    def notes(self) -> list[str]:
        notes = super().notes()
        if self._block is not None and self._ends:
            notes.append(f"block {self._block.number} has no end yet")
        if self._batch is not None:
            notes.append(f"batch {self._batch} has no end yet")
        if self._unended and self._ends:
            notes.append(
                f"{_blocks(self._unended)} without an L2BlockEnd, before the stream's first one"
            )
        elif self._unended:
            notes.append("no block has an L2BlockEnd, which version 3 introduced")
        if self._unnumbered:
            notes.append(f"{_blocks(self._unnumbered)} with several transactions, all of index 0")
        if self._no_parents:
            notes.append(self._no_parents)
        if self._parents is not None:
            notes += [
                f"parents of {fork} are not checked: no block has the expected header hash"
                for fork in self._parents.unconfirmed()
            ]
        return notes

    def _batch_start(self, entry: int, event: events.BatchStart) -> None:
        self._match_bookmark(entry, BookmarkType.BATCH, event.number)
        self._drop_bookmarks()
        self._leave_block(entry, f"batch {event.number} begins")
        if self._batch is not None:
            self._report(
                entry, "batch", f"batch {event.number} begins before batch {self._batch} has ended"
            )
        self._next_batch(entry, event.number)
        self._batch, self._fork, self._batch_root = event.number, event.fork_id, b""

    def _batch_end(self, entry: int, event: events.BatchEnd) -> None:
        self._drop_bookmarks()
        self._leave_block(entry, f"batch {event.number} ends")
        if self._batch is None:
            self._report(entry, "batch", f"batch {event.number} ends, but none is open")
        elif self._batch != event.number:
            self._report(
                entry, "batch", f"batch {event.number} ends, but batch {self._batch} is open"
            )
        elif self._batch_root and event.state_root and event.state_root != self._batch_root:
            self._report(
                entry,
                "root",
                f"batch {event.number} ends with the state root {as_hex(event.state_root)}, its "
                f"last block with {as_hex(self._batch_root)}",
            )
        self._batch = None

    def _update_ger(self, entry: int, event: events.UpdateGER) -> None:
        self._drop_bookmarks()
        self._leave_block(entry, "UpdateGER")

    def _l2_block(self, entry: int, event: events.L2Block) -> None:
        self._match_bookmark(entry, BookmarkType.L2_BLOCK, event.number)
        self._drop_bookmarks()
        self._leave_block(entry, f"block {event.number} begins")
        if self._batch is None:
            self._report(entry, "block", f"block {event.number} begins outside of a batch")
        elif event.batch_number != self._batch:
            self._report(
                entry,
                "block",
                f"block {event.number} is of batch {event.batch_number}, but batch {self._batch} "
                "is open",
            )
        before = self._next_block(entry, event.number, event.timestamp, event.delta_timestamp)
        if event.min_timestamp > event.timestamp:
            self._report(
                entry,
                "timestamp",
                f"block {event.number} has the time {event.timestamp}, before its minimum "
                f"{event.min_timestamp}",
            )
        if before is not None and any(event.hash) and event.hash == before.hash:
            self._report(entry, "parent", f"block {event.number} has its parent's hash")
        self._block = _Block(entry, event, before.hash if before is not None else b"")
        self._batch_root = event.state_root
        self._previous = PreviousBlock(event.number, event.timestamp, event.hash)

    def _transaction(self, entry: int, event: events.Transaction) -> None:
        self._drop_bookmarks()
        if self._block is None:
            self._report(
                entry, "order", f"a transaction of block {event.l2block_number} outside of a block"
            )
            return
        if event.l2block_number != self._block.number:
            self._report(
                entry,
                "transaction",
                f"a transaction of block {event.l2block_number} inside block {self._block.number}",
            )
        expected, self._transactions = self._transactions, self._transactions + 1
        if event.index or (expected and not self._zeros):
            self._check_zeros()
            self._check_index(entry, event.index, expected)
        elif self._zeros and self._zeros[-1].stop == entry:
            self._zeros[-1] = range(self._zeros[-1].start, entry + 1)
        else:
            self._zeros.append(range(entry, entry + 1))

    def _l2_block_end(self, entry: int, event: events.L2BlockEnd) -> None:
        self._drop_bookmarks()
        self._ends = True
        if self._block is None:
            self._report(entry, "order", f"block {event.number} ends, but none is open")
        elif self._block.number != event.number:
            self._report(
                entry, "order", f"block {event.number} ends inside block {self._block.number}"
            )
        self._close_block()

    def _leave_block(self, entry: int, why: str) -> None:
        """The next event is not of the open block."""
        if self._block is None:
            return
        if self._ends:
            self._report(
                entry, "order", f"{why} before the L2BlockEnd of block {self._block.number}"
            )
        else:
            self._unended += 1
        self._close_block()

    def _close_block(self) -> None:
        if self._block is None:
            return
        if self._transactions > 1 and self._zeros:
            self._unnumbered += 1
        if self._parents is not None and self._block.parent and not self._transactions:
            for entry, other, parent in self._parents.add(*self._block, self._fork):
                self._report(
                    entry,
                    "parent",
                    f"the hash of block {other.number}, {as_hex(other.hash)}, does not follow from "
                    f"its parent's, {as_hex(parent)}, and its fields",
                )
        self._transactions = 0
        self._zeros.clear()
        self._block = None

    def _check_zeros(self) -> None:
        """Check the transactions of index 0 so far: the block does number its transactions."""
        for expected, entry in enumerate(itertools.chain.from_iterable(self._zeros)):
            self._check_index(entry, 0, expected)
        self._zeros.clear()

    def _check_index(self, entry: int, index: int, expected: int) -> None:
        if index != expected:
            self._report(entry, "transaction", f"its index is {index}, but {expected} is expected")


def _blocks(number: int) -> str:
    return f"{number:,} block" if number == 1 else f"{number:,} blocks"
