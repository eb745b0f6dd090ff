"""The order of the events in streams of version 1.

The bookmark of a batch where one begins, then for each block its bookmark, StartL2Block, its
L2Txs and EndL2Block. UpdateGER comes between blocks.
"""

from __future__ import annotations

from datastreamer.zkevm import fixed
from datastreamer.zkevm.check.order import Order, PreviousBlock, ReportBreach, as_hex
from datastreamer.zkevm.events import BookmarkType


class FixedOrder(Order):
    """Checks the order of version 1."""

    allows_two_bookmarks = True

    def __init__(self, report: ReportBreach) -> None:
        super().__init__(report)
        # The open block, and the state root of its last transaction.
        self._block: int | None = None
        self._root: bytes | None = None
        self.on |= {
            fixed.StartL2Block: self._start_l2_block,
            fixed.L2Tx: self._l2_tx,
            fixed.EndL2Block: self._end_l2_block,
            fixed.FixedUpdateGER: self._update_ger,
        }

    def notes(self) -> list[str]:
        notes = super().notes()
        if self._block is not None:
            notes.append(f"block {self._block} has no end yet")
        return notes

    def _start_l2_block(self, entry: int, event: fixed.StartL2Block) -> None:
        begins = self.batches is None or event.batch_number != self.batches[1]
        self._match_bookmark(entry, BookmarkType.BATCH, event.batch_number, required=begins)
        self._match_bookmark(entry, BookmarkType.L2_BLOCK, event.number)
        if self._block is not None:
            self._report(
                entry,
                "order",
                f"block {event.number} begins before the EndL2Block of block {self._block}",
            )
        if begins:
            self._next_batch(entry, event.batch_number)
        self._next_block(entry, event.number, event.timestamp, event.delta_timestamp)
        self._block = event.number
        self._previous = PreviousBlock(event.number, event.timestamp, b"")
        self._root = None

    def _l2_tx(self, entry: int, event: fixed.L2Tx) -> None:
        self._drop_bookmarks()
        if self._block is None:
            self._report(entry, "order", "a transaction outside of a block")
        self._root = event.state_root

    def _end_l2_block(self, entry: int, event: fixed.EndL2Block) -> None:
        self._drop_bookmarks()
        if self._block is None:
            self._report(entry, "order", f"block {event.number} ends, but none is open")
        elif self._block != event.number:
            self._report(entry, "order", f"block {event.number} ends inside block {self._block}")
        elif self._root is not None and self._root != event.state_root:
            self._report(
                entry,
                "root",
                f"block {event.number} ends with the state root {as_hex(event.state_root)}, its "
                f"last transaction with {as_hex(self._root)}",
            )
        self._block = self._root = None

    def _update_ger(self, entry: int, event: fixed.FixedUpdateGER) -> None:
        self._match_bookmark(entry, BookmarkType.BATCH, event.batch_number, required=False)
        self._drop_bookmarks()
        if self._block is not None:
            self._report(entry, "order", f"UpdateGER inside block {self._block}")
        # It is a batch of its own, without blocks.
        first, last = self.batches or (event.batch_number, event.batch_number)
        self.batches = first, max(last, event.batch_number)
