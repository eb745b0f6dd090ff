"""Checks that a stream is consistent: entries, bookmarks, batches, blocks, times and parents.

Owns the counts and the report; `message_order` and `fixed_order` own the order of events. Receives
all entries from the stream's start on.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

from datastreamer._codec import EntryBatch
from datastreamer.errors import DecodeFailed
from datastreamer.zkevm.check.fixed_order import FixedOrder
from datastreamer.zkevm.check.message_order import MessageOrder
from datastreamer.zkevm.check.order import Order
from datastreamer.zkevm.decoding import decode_data, event_name, kind_of
from datastreamer.zkevm.schema import FIRST_PROTOBUF_VERSION


class Breach(NamedTuple):
    """A broken rule: the entry that breaks it, the rule, and how."""

    entry: int
    rule: str
    what: str


class SequenceReport(NamedTuple):
    """The result of a check. `events` counts events by kind; `batches` and `blocks` are the first
    and the last number.

    `parents` counts the blocks whose parent hash was checked, `broken` the breaches by rule;
    `first` is the first entry with a breach. `breaches` is ordered by entry, and empty if they were
    passed to `on_breach`.
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
        found = self._asdict()
        return {"ok": self.ok, **found, "breaches": [breach._asdict() for breach in self.breaches]}


class SequenceCheck:
    """Checks a stream of this version: `feed` it all entries in order, then call `report`.

    Breaches are collected for the report; or `on_breach` is called with each one, nearly in the
    order of entries, and none is kept: a stream may have as many as entries.
    """

    def __init__(self, version: int, on_breach: Callable[[Breach], None] | None = None) -> None:
        self._version = version
        self._breaches: list[Breach] = []
        self._on_breach = self._breaches.append if on_breach is None else on_breach
        self._broken: Counter[str] = Counter()
        self._first: int | None = None
        self._counts: Counter[str] = Counter()
        self._expected = 0
        self._entries = 0
        # Events with fields that the schema does not have, and the first one's entry.
        self._newer, self._first_newer = 0, 0
        self._order: Order
        if version < FIRST_PROTOBUF_VERSION:
            self._order = FixedOrder(self._breach)
        else:
            self._order = MessageOrder(self._breach, version)

    def feed(self, batch: EntryBatch) -> None:
        """Check the next entries."""
        if batch.first_number != self._expected:
            found = batch.first_number
            self._breach(found, "entry", f"entry {found} follows, but {self._expected} is expected")
        self._expected = batch.next_number
        self._entries += len(batch)
        version, on, counts = self._version, self._order.on, self._counts
        for entry in batch:
            number = entry.number
            try:
                event = decode_data(entry.type, entry.data, version=version, number=number)
            except DecodeFailed as error:
                self._breach(number, "decode", error.reason)
                counts[kind_of(entry.type, version) or f"type {entry.type}"] += 1
                continue
            counts[event_name(event)] += 1
            on[type(event)](number, event)
            if getattr(event, "unknown", b""):
                self._first_newer = self._first_newer if self._newer else number
                self._newer += 1

    def report(self) -> SequenceReport:
        """The result so far."""
        order, notes = self._order, self._order.notes()
        if self._newer:
            notes.append(
                f"{self._newer} events have fields that are not examined, the first in entry "
                f"{self._first_newer}: a newer schema wrote them"
            )
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
            notes=notes,
        )

    def _breach(self, entry: int, rule: str, what: str) -> None:
        self._broken[rule] += 1
        if self._first is None or entry < self._first:
            self._first = entry
        self._on_breach(Breach(entry, rule, what))
