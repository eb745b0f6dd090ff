"""Whether a stream tells one story: entries, bookmarks, batches, blocks, times and parents.

Owns what is counted and how it is told; the orders that events have stand in
`order_messages` and `order_fixed`. Fed with runs of entries from the stream's start on; every
breach has its entry's number.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

from datastreamer._codec import EntryBatch
from datastreamer.errors import DecodeFailed
from datastreamer.zkevm.decoding import decode_data, event_name, kind_of
from datastreamer.zkevm.order import Order
from datastreamer.zkevm.order_fixed import FixedOrder
from datastreamer.zkevm.order_messages import MessageOrder
from datastreamer.zkevm.schema import FIRST_PROTOBUF_VERSION


class Breach(NamedTuple):
    """What is out of order: the entry's number, the rule that it breaks, and how."""

    entry: int
    rule: str
    what: str


class SequenceReport(NamedTuple):
    """What a check has found. `events` counts kinds of events; spans are first and last number.

    `parents` counts the blocks whose parent's hash could be checked, `broken` the breaches by
    rule; `first` is the first entry with one. `breaches` are in the order of entries, and none
    where they were told one by one.
    """

    version: int
    entries: int
    events: dict[str, int]
    batches: tuple[int, int] | None
    blocks: tuple[int, int] | None
    parents: int
    broken: dict[str, int]
    first: int | None
    breaches: list[Breach]
    notes: list[str]

    @property
    def ok(self) -> bool:
        return not self.broken

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        found = self._asdict()
        return {"ok": self.ok, **found, "breaches": [breach._asdict() for breach in self.breaches]}


class SequenceCheck:
    """Feed it all runs of entries in order, then ask for the report. `version` is the stream's.

    Breaches are kept for the report; or `tell` is called with each when it is found, which is
    nearly in the order of entries, and none is kept: a stream may have as many as entries.
    """

    def __init__(self, version: int, tell: Callable[[Breach], None] | None = None) -> None:
        self._version = version
        self._breaches: list[Breach] = []
        self._tell = self._breaches.append if tell is None else tell
        self._broken: Counter[str] = Counter()
        self._first: int | None = None
        self._counts: Counter[str] = Counter()
        self._due = 0
        self._entries = 0
        self._order: Order
        if version < FIRST_PROTOBUF_VERSION:
            self._order = FixedOrder(self._complain)
        else:
            self._order = MessageOrder(self._complain, version)

    def feed(self, batch: EntryBatch) -> None:
        """Look at the entries that come next."""
        if batch.first_number != self._due:
            found = batch.first_number
            self._complain(found, "entry", f"entry {found} follows, where {self._due} is due")
        self._due = batch.next_number
        self._entries += len(batch)
        version, on, counts = self._version, self._order.on, self._counts
        for entry in batch:
            number = entry.number
            try:
                event = decode_data(entry.type, entry.data, version=version, number=number)
            except DecodeFailed as error:
                self._complain(number, "decode", error.reason)
                counts[kind_of(entry.type, version) or f"type {entry.type}"] += 1
                continue
            counts[event_name(event)] += 1
            on[type(event)](number, event)

    def report(self) -> SequenceReport:
        """What was found up to here."""
        order = self._order
        return SequenceReport(
            version=self._version,
            entries=self._entries,
            events=dict(sorted(self._counts.items())),
            batches=order.batches,
            blocks=order.blocks,
            parents=order.parents,
            broken=dict(sorted(self._broken.items())),
            first=self._first,
            breaches=sorted(self._breaches, key=lambda breach: breach.entry),
            notes=order.notes(),
        )

    def _complain(self, entry: int, rule: str, what: str) -> None:
        self._broken[rule] += 1
        if self._first is None or entry < self._first:
            self._first = entry
        self._tell(Breach(entry, rule, what))
