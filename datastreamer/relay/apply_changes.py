"""Changes of committed entries that an upstream reports, applied to our file in order.

Owns which changes are heard and not applied yet, and the agreement that the file keeps: with
which state of the upstream its entries agree. Knows no connection. From any thread, one at a
time.
"""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

from datastreamer._codec import Entry
from datastreamer.errors import ConnectionLost, UpstreamRewritten
from datastreamer.format import TYPE_BOOKMARK
from datastreamer.protocol.following import ChangeReceived
from datastreamer.storage.header.records import Agreement
from datastreamer.storage.stream import DataStream

_log = logging.getLogger(__name__)

MOST_WAITING: Final = 64 << 20
"""Bytes of updates that wait for the end of an operation that is being received. With more the
connection is given up: what was received of the operation is dropped, and they are applied."""


# No difference is an update, whatever the epoch.
_NO_ALLOWANCE: Final = -(1 << 63)


@dataclass(frozen=True, slots=True)
class Compared:
    """All entries before `upto` (None: some) were compared with the upstream's; `updates` are
    those of its entries there that differed."""

    updates: tuple[Entry, ...]
    upto: int | None


_Step: TypeAlias = ChangeReceived | Compared


def is_update_of(ours: Entry, theirs: Entry) -> bool:
    """Whether `theirs` may be `ours` after an update in place."""
    same = ours.type == theirs.type and len(ours.data) == len(theirs.data)
    return same and ours.type != TYPE_BOOKMARK


class ChangeApplier:
    """What one upstream reports from a join on, and what became of it."""

    def __init__(
        self, stream: DataStream, peer: str, agreement: Agreement | None, *, keep: bool = True
    ) -> None:
        """`agreement` is with the state of the upstream from which on changes are heard; None:
        none are. Without `keep` the file keeps it from `begin` on."""
        self._stream = stream
        self._peer = peer
        self._keep = keep
        self.agreement = agreement
        self.heard_epoch = 0 if agreement is None else agreement.epoch
        """Up to which epoch of the upstream's changes were heard."""
        self.on_heard: Callable[[], None] = lambda: None
        """Called, in any thread, when that has risen."""
        self.updates = 0
        """Entries that were replaced here."""
        # Entries that were changed since the join, while others are still compared: what is
        # reported of these is newer than what a comparison finds.
        self._named: set[int] = set()
        self._waiting: deque[_Step] = deque()
        self._size = 0

    @property
    def waiting(self) -> bool:
        """Whether something is to be applied when no operation is open."""
        return bool(self._waiting)

    def is_named(self, number: int) -> bool:
        """Whether a change of entry `number` was heard since the join."""
        return number in self._named

    def hear(self, changes: deque[ChangeReceived], received: int) -> None:
        """Take the reports that came after `received` entries of the stream.

        Raises `ConnectionLost` where some of these were cut off.
        """
        while changes:
            change = changes.popleft()
            if change.entry is None and change.first < received:
                raise ConnectionLost(
                    f"{self._peer} went back to {change.first} entries; compared again"
                )
            self._waiting.append(change)
            if change.entry is not None:
                self._size += len(change.entry.data)
                if self.agreement is not None and self.agreement.low < self.agreement.high:
                    self._named.add(change.first)
            self.heard_epoch = change.epoch
            self.on_heard()
        if self._size > MOST_WAITING:
            raise ConnectionLost(
                f"{self._peer} updated entries while it sent a long operation; received again"
            )

    @property
    def doubtful(self) -> int:
        """How many entries are still to be compared."""
        return 0 if self.agreement is None else self.agreement.high - self.agreement.low

    def doubt(self, low: int, high: int) -> None:
        """The upstream cut off its entries from `low` on since ours agreed with it: ours before
        `high` are to be compared, too. None of them was updated without a report."""
        agreement = self.agreement
        assert agreement is not None
        if self.doubtful:
            low, high = min(low, agreement.low), max(high, agreement.high)
            self.agreement = agreement._replace(low=low, high=high)
        else:
            self.agreement = agreement._replace(low=low, high=high, allowance=_NO_ALLOWANCE)

    def begin(self, high: int) -> None:
        """All entries from `high` on are the same, and the upstream's are kept from now on."""
        if self.agreement is None:
            if self._stream.agreement is not None:
                self._stream.put_agreement(None)
            return
        self._keep = True
        self.agreement = self.agreement._replace(high=min(high, self.agreement.high))
        self._note()

    def takes_as_updates(self, differing: Sequence[Entry], others: int) -> bool:
        """Whether these entries of the upstream's, which a comparison found not to be ours, may
        be updates that were not reported, as `others` are that it found before."""
        agreement = self.agreement
        if agreement is None or not self.doubtful:
            return False
        if others + len(differing) > self.heard_epoch + agreement.allowance:
            return False
        return all(
            agreement.low <= entry.number < agreement.high
            and is_update_of(self._stream.entry(entry.number), entry)
            for entry in differing
        )

    def compared(self, found: Compared) -> None:
        """Take what a comparison found, behind what was heard."""
        self._waiting.append(found)

    def apply(self, seconds: float = math.inf) -> None:
        """Apply what waits, each change durably before the next, for about so many seconds; no
        operation is open.

        Raises what an update raises, and `UpstreamRewritten` for one that fits no entry of ours.
        """
        until = time.monotonic() + seconds
        while self._waiting and time.monotonic() < until:
            step = self._waiting[0]
            if isinstance(step, ChangeReceived):
                if step.entry is not None:
                    self._update(step.entry)
                self._note(epoch=step.epoch)
            else:
                # Those that were named since are newer here.
                self._replace(each for each in step.updates if each.number not in self._named)
                self._note(low=step.upto)
            self._waiting.popleft()
        if not self._waiting:
            self._size = 0

    def _replace(self, updates: Iterable[Entry]) -> None:
        for entry in updates:
            _log.warning(
                "entry %d was updated in place by %s without our hearing of it; it is replaced",
                entry.number,
                self._peer,
            )
            self._update(entry)

    def _update(self, entry: Entry) -> None:
        stream, number = self._stream, entry.number
        if number >= stream.next_entry:
            return  # not received yet: what will be sent is the new one
        if number >= stream.total_entries:
            stream.sync()
        ours = stream.entry(number)
        if ours.data == entry.data and ours.type == entry.type:
            return
        if not is_update_of(ours, entry):
            raise UpstreamRewritten(
                f"{self._peer} updated its entry {number} (type {entry.type}, {len(entry.data)} "
                f"bytes), which is no update of ours (type {ours.type}, {len(ours.data)} bytes)",
                number,
            )
        stream.update_entry(number, entry.type, entry.data)
        self.updates += 1

    def _note(self, *, epoch: int | None = None, low: int | None = None) -> None:
        """The file agrees with that from now on."""
        agreement = self.agreement
        if agreement is None:
            return
        agreement = agreement._replace(
            epoch=agreement.epoch if epoch is None else epoch,
            low=agreement.low if low is None else low,
            own_epoch=self._stream.epoch,
        )
        if agreement.low >= agreement.high:
            agreement = agreement._replace(low=0, high=0, allowance=0)
            self._named.clear()
        if self._keep:
            self._stream.put_agreement(agreement)
        self.agreement = agreement


def known_agreement(stream: DataStream) -> Agreement | None:
    """The agreement that the file keeps, if its entries were not changed since."""
    agreement = stream.agreement
    if agreement is None or agreement.own_epoch != stream.epoch:
        return None
    return agreement


def keep_over_truncation(stream: DataStream, before: Agreement | None) -> None:
    """After a truncation of our own: the entries that are left agree as they did."""
    if before is not None:
        high = min(before.high, stream.total_entries)
        low = min(before.low, high)
        stream.put_agreement(before._replace(own_epoch=stream.epoch, low=low, high=high))
