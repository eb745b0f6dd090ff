"""Applies the updates and truncations that an upstream reports to the relay's file, in order.

Owns the changes that were reported and are not applied yet, and the agreement that the file
stores: with which state of the upstream its entries agree. Knows no connection. Callable from any
thread, one at a time.
"""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final, TypeAlias

from datastreamer._codec import Entry
from datastreamer.errors import ConnectionLost, DatastreamerError, UpstreamRewritten
from datastreamer.format import TYPE_BOOKMARK
from datastreamer.protocol.following import ChangeReceived
from datastreamer.storage.header.records import Agreement
from datastreamer.storage.stream import DataStream

_log = logging.getLogger(__name__)

MAX_WAITING_BYTES: Final = 64 << 20
"""Maximum bytes of updates that wait for the end of an operation that is being received. Beyond it
the connection is closed: the incomplete operation is dropped and the updates are applied."""


# An allowance with which no difference counts as an update, whatever the epoch.
_NO_ALLOWANCE: Final = -(1 << 63)


@dataclass(frozen=True, slots=True)
class Compared:
    """The result of a comparison of all entries before `upto` (None: of some entries) with the
    upstream's; `updates` are the upstream's entries that differed."""

    updates: tuple[Entry, ...]
    upto: int | None


_Step: TypeAlias = ChangeReceived | Compared


def is_update_of(ours: Entry, theirs: Entry) -> bool:
    """Whether `theirs` may be `ours` after an update in place."""
    same = ours.type == theirs.type and len(ours.data) == len(theirs.data)
    return same and ours.type != TYPE_BOOKMARK


class ChangeApplier:
    """Applies what one upstream reports from a join on."""

    def __init__(
        self, stream: DataStream, peer: str, agreement: Agreement | None, *, keep: bool = True
    ) -> None:
        """`agreement` is with the state of the upstream from which on changes are reported; None:
        the upstream reports none. Without `keep` the file stores it only from `begin` on."""
        self._stream = stream
        self._peer = peer
        self._keep = keep
        self.agreement = agreement
        self.reported_epoch = 0 if agreement is None else agreement.epoch
        """The upstream's epoch up to which changes were reported."""
        self.on_report: Callable[[], None] = lambda: None
        """Called, in any thread, when `reported_epoch` has risen."""
        self.updates = 0
        """Entries that were replaced here."""
        # Entries that were reported as changed while others are still compared: a report is newer
        # than the result of a comparison.
        self._reported_entries: set[int] = set()
        self._waiting: deque[_Step] = deque()
        self._size = 0

    @property
    def waiting(self) -> bool:
        """Whether changes wait to be applied when no operation is open."""
        return bool(self._waiting)

    def was_reported(self, number: int) -> bool:
        """Whether a change of entry `number` was reported since the join."""
        return number in self._reported_entries

    def add_reports(self, changes: deque[ChangeReceived], received: int) -> None:
        """Add the reports that arrived after `received` entries of the stream.

        Raises `ConnectionLost` if some of these entries were truncated.
        """
        while changes:
            change = changes.popleft()
            if change.entry is None and change.first < received:
                raise ConnectionLost(
                    f"{self._peer} truncated its stream to {change.first} entries; comparing again"
                )
            self._waiting.append(change)
            if change.entry is not None:
                self._size += len(change.entry.data)
                if self.agreement is not None and self.agreement.low < self.agreement.high:
                    self._reported_entries.add(change.first)
            self.reported_epoch = change.epoch
            self.on_report()
        if self._size > MAX_WAITING_BYTES:
            raise ConnectionLost(
                f"{self._peer} updated too many entries within one operation; receiving it again"
            )

    @property
    def uncompared(self) -> int:
        """The number of entries that are still to be compared."""
        return 0 if self.agreement is None else self.agreement.high - self.agreement.low

    def add_uncompared(self, low: int, high: int) -> None:
        """The upstream truncated its entries from `low` on since the file agreed with it: the
        file's entries from there up to `high` must be compared, too. No update of these was
        missed."""
        agreement = self.agreement
        assert agreement is not None
        if self.uncompared:
            low, high = min(low, agreement.low), max(high, agreement.high)
            self.agreement = agreement._replace(low=low, high=high)
        else:
            self.agreement = agreement._replace(low=low, high=high, allowance=_NO_ALLOWANCE)

    def begin(self, high: int) -> None:
        """All entries from `high` on are the same; entries of this upstream are appended from now
        on."""
        if self.agreement is None:
            if self._stream.parts.relay.agreement is not None:
                self._stream.parts.relay.put_agreement(None)
            return
        self._keep = True
        self.agreement = self.agreement._replace(high=min(high, self.agreement.high))
        self._note()

    def can_be_updates(self, differing: Sequence[Entry], others: int) -> bool:
        """Whether these entries of the upstream, which differ from the file's, may be updates that
        were not reported, in addition to `others` found before."""
        agreement = self.agreement
        if agreement is None or not self.uncompared:
            return False
        if others + len(differing) > self.reported_epoch + agreement.allowance:
            return False
        return all(
            agreement.low <= entry.number < agreement.high
            and is_update_of(self._stream.entry(entry.number), entry)
            for entry in differing
        )

    def compared(self, found: Compared) -> None:
        """Add the result of a comparison, to be applied after the reports."""
        self._waiting.append(found)

    def apply(self, seconds: float = math.inf) -> None:
        """Apply waiting changes, each durably before the next, for about `seconds` seconds. No
        operation may be open.

        Raises what an update raises, and `UpstreamRewritten` for one that does not fit its entry.
        The change that raises waits, and so do those after it.
        """
        until = time.monotonic() + seconds
        while self._waiting and time.monotonic() < until:
            step = self._waiting[0]
            if isinstance(step, ChangeReceived):
                if step.entry is not None:
                    self._update(step.entry)
                self._note(epoch=step.epoch)
            else:
                # Entries that were reported since are newer in the file.
                self._replace(
                    each for each in step.updates if each.number not in self._reported_entries
                )
                self._note(low=step.upto)
            self._waiting.popleft()
        if not self._waiting:
            self._size = 0

    def _replace(self, updates: Iterable[Entry]) -> None:
        for entry in updates:
            _log.warning(
                "replacing entry %d: %s updated it in place and did not report it",
                entry.number,
                self._peer,
            )
            self._update(entry)

    def _update(self, entry: Entry) -> None:
        stream, number = self._stream, entry.number
        if number >= stream.parts.writer.next_entry:
            return  # not received yet: the upstream will send the new version
        if number >= stream.total_entries:
            stream.sync()
        with reading(stream, number, number + 1):
            ours = stream.entry(number)
        if ours.data == entry.data and ours.type == entry.type:
            return
        if not is_update_of(ours, entry):
            ensure_whole(stream, number, number + 1)
            raise UpstreamRewritten(
                f"{self._peer} updated its entry {number} (type {entry.type}, {len(entry.data)} "
                f"bytes), but this relay's entry has type {ours.type} and {len(ours.data)} bytes",
                number,
            )
        stream.update_entry(number, entry.type, entry.data)
        self.updates += 1

    def _note(self, *, epoch: int | None = None, low: int | None = None) -> None:
        """Store the progress in the agreement."""
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
            self._reported_entries.clear()
        if self._keep:
            self._stream.parts.relay.put_agreement(agreement)
        self.agreement = agreement


def ensure_whole(stream: DataStream, first: int, stop: int) -> None:
    """Raises `DamagedEntry` if a page of the file that holds these entries is damaged: then nothing
    follows from a difference."""
    damaged = stream.parts.pages.damaged(first, stop)
    if damaged:
        raise damaged[0]


@contextmanager
def reading(stream: DataStream, first: int, stop: int) -> Iterator[None]:
    """The block reads these entries of the file. Raises as `ensure_whole` if the disk refuses."""
    try:
        yield
    except OSError as error:
        if not isinstance(error, DatastreamerError):
            ensure_whole(stream, first, stop)
        raise


def known_agreement(stream: DataStream) -> Agreement | None:
    """The agreement in the file, if its entries were not changed since."""
    agreement = stream.parts.relay.agreement
    if agreement is None or agreement.own_epoch != stream.epoch:
        return None
    return agreement


@contextmanager
def keeping_agreement(stream: DataStream) -> Iterator[None]:
    """The block truncates or changes the file; what remains agrees as before."""
    before = known_agreement(stream)
    yield
    if before is not None:
        high = min(before.high, stream.total_entries)
        low = min(before.low, high)
        stream.parts.relay.put_agreement(
            before._replace(own_epoch=stream.epoch, low=low, high=high)
        )
