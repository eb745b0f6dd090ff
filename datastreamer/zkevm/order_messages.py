"""The order of the events of streams from version 2 on.

A batch's bookmark, BatchStart, then for each block its bookmark, L2Block, its Transactions,
L2BlockEnd (from version 3 on, or once the stream has one), then BatchEnd. UpdateGER stands
outside of blocks.
"""

from __future__ import annotations

import itertools
from typing import NamedTuple

from datastreamer.errors import ExtraMissing
from datastreamer.zkevm import events
from datastreamer.zkevm.events import BookmarkType
from datastreamer.zkevm.order import Complain, Order, Seen, as_hex
from datastreamer.zkevm.parents import Parents
from datastreamer.zkevm.schema import FIRST_BLOCK_END_VERSION
from datastreamer.zkevm.transactions import keccak


class _Block(NamedTuple):
    """A block that has begun, its entry, and the hash of the block before where it is known."""

    entry: int
    event: events.L2Block
    parent: bytes

    @property
    def number(self) -> int:
        return self.event.number


class MessageOrder(Order):
    """See the module. Parents are checked where the extra ``zkevm`` is installed."""

    def __init__(self, complain: Complain, version: int) -> None:
        super().__init__(complain)
        self._batch: int | None = None
        self._batch_root = b""
        self._fork = 0
        self._block: _Block | None = None
        self._ends = version >= FIRST_BLOCK_END_VERSION
        # How many transactions the block has so far; and while all have index 0 the entries of
        # these, as ranges: they are out of order if another index comes.
        self._transactions = 0
        self._zeros: list[range] = []
        self._unnumbered = 0
        self._unended = 0
        self._parents: Parents | None = None
        self._no_parents = ""
        try:
            self._parents = Parents(keccak())
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
            notes.append("no block has an L2BlockEnd, which came with version 3")
        if self._unnumbered:
            notes.append(f"{_blocks(self._unnumbered)} with several transactions, all of index 0")
        if self._no_parents:
            notes.append(self._no_parents)
        if self._parents is not None:
            notes += [
                f"parents of fork {fork} are not checked: its blocks have other headers"
                for fork in self._parents.unproved()
            ]
        return notes

    # Batches.

    def _batch_start(self, entry: int, event: events.BatchStart) -> None:
        self._marked(entry, BookmarkType.BATCH, event.number)
        self._drop_marks()
        self._leave_block(entry, f"batch {event.number} begins")
        if self._batch is not None:
            self._complain(
                entry, "batch", f"batch {event.number} begins before batch {self._batch} has ended"
            )
        self._next_batch(entry, event.number)
        self._batch, self._fork, self._batch_root = event.number, event.fork_id, b""

    def _batch_end(self, entry: int, event: events.BatchEnd) -> None:
        self._drop_marks()
        self._leave_block(entry, f"batch {event.number} ends")
        if self._batch is None:
            self._complain(entry, "batch", f"batch {event.number} ends, and none is open")
        elif self._batch != event.number:
            self._complain(
                entry, "batch", f"batch {event.number} ends, and batch {self._batch} is open"
            )
        elif self._batch_root and event.state_root and event.state_root != self._batch_root:
            self._complain(
                entry,
                "root",
                f"batch {event.number} ends with the state root {as_hex(event.state_root)}, its "
                f"last block with {as_hex(self._batch_root)}",
            )
        self._batch = None

    def _update_ger(self, entry: int, event: events.UpdateGER) -> None:
        self._drop_marks()
        self._leave_block(entry, "UpdateGER")

    # Blocks.

    def _l2_block(self, entry: int, event: events.L2Block) -> None:
        self._marked(entry, BookmarkType.L2_BLOCK, event.number)
        self._drop_marks()
        self._leave_block(entry, f"block {event.number} begins")
        if self._batch is None:
            self._complain(entry, "block", f"block {event.number} begins outside of a batch")
        elif event.batch_number != self._batch:
            self._complain(
                entry,
                "block",
                f"block {event.number} is of batch {event.batch_number}, and batch {self._batch} "
                "is open",
            )
        before = self._next_block(entry, event.number, event.timestamp, event.delta_timestamp)
        if event.min_timestamp > event.timestamp:
            self._complain(
                entry,
                "timestamp",
                f"block {event.number} is of {event.timestamp}, before its least timestamp "
                f"{event.min_timestamp}",
            )
        if before is not None and any(event.hash) and event.hash == before.hash:
            self._complain(entry, "parent", f"block {event.number} has its parent's hash")
        self._block = _Block(entry, event, before.hash if before is not None else b"")
        self._batch_root = event.state_root
        self._seen = Seen(event.number, event.timestamp, event.hash)

    def _transaction(self, entry: int, event: events.Transaction) -> None:
        self._drop_marks()
        if self._block is None:
            self._complain(
                entry, "order", f"a transaction of block {event.l2block_number} outside of a block"
            )
            return
        if event.l2block_number != self._block.number:
            self._complain(
                entry,
                "transaction",
                f"a transaction of block {event.l2block_number} inside block {self._block.number}",
            )
        due, self._transactions = self._transactions, self._transactions + 1
        if event.index or (due and not self._zeros):
            self._number_zeros()
            self._number(entry, event.index, due)
        elif self._zeros and self._zeros[-1].stop == entry:
            self._zeros[-1] = range(self._zeros[-1].start, entry + 1)
        else:
            self._zeros.append(range(entry, entry + 1))

    def _l2_block_end(self, entry: int, event: events.L2BlockEnd) -> None:
        self._drop_marks()
        self._ends = True
        if self._block is None:
            self._complain(entry, "order", f"block {event.number} ends, and none is open")
        elif self._block.number != event.number:
            self._complain(
                entry, "order", f"block {event.number} ends inside block {self._block.number}"
            )
        self._close_block()

    def _leave_block(self, entry: int, why: str) -> None:
        """Whatever comes now stands outside of blocks."""
        if self._block is None:
            return
        if self._ends:
            self._complain(
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
                self._complain(
                    entry,
                    "parent",
                    f"the hash of block {other.number}, {as_hex(other.hash)}, does not follow from "
                    f"its parent's, {as_hex(parent)}, and its fields",
                )
        self._transactions = 0
        self._zeros.clear()
        self._block = None

    def _number_zeros(self) -> None:
        """The transactions so far, all of index 0, are numbered after all."""
        for due, entry in enumerate(itertools.chain.from_iterable(self._zeros)):
            self._number(entry, 0, due)
        self._zeros.clear()

    def _number(self, entry: int, index: int, due: int) -> None:
        if index != due:
            self._complain(entry, "transaction", f"its index is {index}, where {due} is due")


def _blocks(number: int) -> str:
    return f"{number:,} block" if number == 1 else f"{number:,} blocks"
