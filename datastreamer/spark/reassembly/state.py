"""Reassembly that goes on from batch to batch: what is kept of a lane, and how it goes on.

Owns the state of a streaming query: the messages that are in flight, and what was given out.
`Lane` is that without Spark; `Lanes` keeps it in Spark's state store. What a message means is
the core's: a lane is put before a `Reassembler` again at each batch, in the order in which
its messages had come.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from pyspark.sql import Row
from pyspark.sql.streaming.stateful_processor import (
    StatefulProcessor,
    StatefulProcessorHandle,
    TimerValues,
)

from datastreamer.format import U32_MAX
from datastreamer.reassembly import (
    Checkpoint,
    Conflict,
    Dropped,
    Event,
    Malformed,
    PayloadComplete,
    Reassembler,
    scan_records,
)
from datastreamer.reassembly.splitter import PREFIX_SIZE
from datastreamer.spark.reassembly.duplicates import Late, kept_of
from datastreamer.spark.reassembly.event_rows import SHOWN, TOLD, row_of, without_key

STATE_SETTINGS: Final = {
    "spark.sql.streaming.stateStore.providerClass": (
        "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider"
    )
}
"""What a session needs for streaming queries with a state of ours."""

_HEADERS: Final = (b"\x00", b"\xff")


class Held(NamedTuple):
    """A message in flight, in the order of `serial`; `since` is when it came."""

    serial: int
    key: bytes
    value: bytes
    source: str
    position: int | None
    since: float


class DeliveredPayload(NamedTuple):
    """A payload that was given out; `kept` bytes are there of its messages, to tell what comes
    late."""

    id: bytes
    prefixes: tuple[bytes, ...]
    kept: int


@dataclass
class Lane:
    """What is kept from one batch to the next.

    `held` has the messages in flight by the first 33 bytes of their keys, then by key; `known`
    the payloads that were given out, by the number of each, and `given` what is kept of their
    messages, of those that this batch gave out. `touched`, `added`, `thinned` (whose messages are
    not kept any more) and `forgotten` say what of these changed since they were read, `stored`
    what was there then.
    """

    serial: int = 0
    fresh: int = 0
    held: dict[bytes, dict[bytes, Held]] = field(default_factory=dict)
    known: dict[int, DeliveredPayload] = field(default_factory=dict)
    given: dict[int, bytes] = field(default_factory=dict)
    touched: set[bytes] = field(default_factory=set)
    forgotten: list[int] = field(default_factory=list)
    thinned: list[int] = field(default_factory=list)
    added: list[int] = field(default_factory=list)
    stored: set[bytes | int] = field(default_factory=set)


class Run:
    """One batch of a lane: the core, with all that the lane holds.

    `read` gives what batches before this one have kept of a payload's messages.
    """

    def __init__(
        self,
        lane: Lane,
        subscribe: Sequence[bytes] | None,
        max_age: float | None,
        budget: int,
        read: Callable[[int], bytes],
    ) -> None:
        self._lane = lane
        self._read = read
        self._late: dict[int, Late] = {}
        self._subscribe = subscribe
        self._core = Reassembler(
            subscribe,
            reorg_threshold=U32_MAX,
            budget=budget,
            max_age=max_age,
            resume=Checkpoint({}, {}, [(one.id, one.prefixes) for one in lane.known.values()]),
        )
        # By what batches before have given out; the core knows more of what this one does.
        self._before = {
            own: number
            for number, one in lane.known.items()
            for own in (b"\x00" + one.id, *one.prefixes)
        }
        self._done = set(self._before)
        self.dropped: list[Event] = []
        """What no longer fits the budget, which may be smaller than in the run before."""
        held = [held for of_node in lane.held.values() for held in of_node.values()]
        for message in sorted(held):
            events = self._core.receive(
                message.key, message.value, message.source, message.position, message.since
            )
            # All else was told when it came.
            self.dropped += [event for event in events if isinstance(event, Dropped)]
        for event in self.dropped:
            self._follow(event)

    def take(
        self,
        key: bytes | None,
        value: bytes,
        source: str | None,
        position: int | None,
        now: float,
    ) -> Iterator[Event]:
        """Take a message; gives what comes of it."""
        source = source or ""
        # What is too old goes before the message comes, which may be of the same payload.
        yield from self.expire(now)
        if key is None:
            yield without_key(value, source, position)
            return
        events = self._core.receive(key, value, source, position, now)
        own = key[:PREFIX_SIZE]
        if own not in self._done and not self._refused(events, key):
            of_node = self._lane.held.setdefault(own, {})
            if key not in of_node:
                of_node[key] = Held(self._lane.serial, key, value, source, position, now)
                self._lane.serial += 1
                self._lane.touched.add(own)
        if not events and own in self._before:
            late = self._late_of(self._before[own])
            told = None if late is None else late.event(key, value, source, position)
            if told is not None:
                yield told
        for event in events:
            self._follow(event)
            yield event

    def _late_of(self, number: int) -> Late | None:
        known = self._lane.known[number]
        if known.kept and number not in self._late:
            self._late[number] = Late(known.id, known.prefixes, self._read(number))
        return self._late.get(number)

    def expire(self, now: float) -> Iterator[Event]:
        """Tell the time."""
        for event in self._core.expire(now):
            self._follow(event)
            yield event

    @staticmethod
    def _refused(events: Sequence[Event], key: bytes) -> bool:
        """Whether a message was not taken: an event says so that is of this one, and not of one
        that had waited."""
        return any(
            event.source is not None and event.key == key[:SHOWN]
            for event in events
            if isinstance(event, Malformed)
            or (isinstance(event, Conflict) and event.what != "count")
        )

    def _follow(self, event: Event) -> None:
        """Hold no more than the core does."""
        if isinstance(event, PayloadComplete):
            kept = self._kept_of(event)
            self._let_go([b"\x00" + event.id, *event.prefixes])
            self._done.update((b"\x00" + event.id, *event.prefixes))
            number = next(reversed(self._lane.known), -1) + 1
            self._lane.known[number] = DeliveredPayload(event.id, event.prefixes, len(kept))
            self._lane.given[number] = kept
            self._lane.added.append(number)
            self._lane.fresh += 1
        elif isinstance(event, Dropped) and event.payload is not None:
            self._let_go(self._announced(b"\x00" + event.payload))
        elif isinstance(event, Dropped):
            assert event.prefix is not None
            self._let_go([event.prefix])
        elif event.source is None and (
            isinstance(event, Malformed) or (isinstance(event, Conflict) and event.what != "count")
        ):
            # It had waited, and was not taken in the end.
            own = event.key[:PREFIX_SIZE]
            of_node = self._lane.held.get(own, {})
            for key in [key for key in of_node if key[:SHOWN] == event.key]:
                del of_node[key]
                self._lane.touched.add(own)

    def _kept_of(self, event: PayloadComplete) -> bytes:
        held = self._lane.held
        [header] = held[b"\x00" + event.id].values()
        messages = {
            prefix: [(one.key, one.value) for one in held.get(prefix, {}).values()]
            for prefix in event.prefixes
        }
        return kept_of(header.value, event.prefixes, messages)

    def _let_go(self, nodes: Iterable[bytes]) -> None:
        for own in nodes:
            if self._lane.held.pop(own, None) is not None:
                self._lane.touched.add(own)

    def _announced(self, header: bytes) -> list[bytes]:
        """The nodes of a payload, as its headers announce them."""
        found = [header]
        seen = {header}
        for own in found:
            if own[:1] in _HEADERS:
                for held in self._lane.held.get(own, {}).values():
                    for prefix, _ in scan_records(held.value):
                        if prefix not in seen:
                            seen.add(prefix)
                            found.append(prefix)
        return found


def forget(lane: Lane, threshold: int, budget: int) -> None:
    """Forget the older generation where the younger one has grown past the threshold; and of the
    oldest the messages, where more than `budget` bytes are kept of them."""
    if lane.fresh > threshold:
        for number in list(lane.known)[: len(lane.known) - lane.fresh]:
            del lane.known[number]
            lane.given.pop(number, None)
            lane.forgotten.append(number)
        lane.fresh = 0
    kept = sum(one.kept for one in lane.known.values())
    for number, one in lane.known.items():
        if kept <= budget:
            break
        if one.kept:
            kept -= one.kept
            lane.known[number] = one._replace(kept=0)
            lane.given.pop(number, None)
            lane.thinned.append(number)


class Lanes(StatefulProcessor):
    """The lanes of a streaming query, each kept under its own key in Spark's state store."""

    def __init__(
        self,
        subscribe: Sequence[bytes] | None,
        order: Sequence[str],
        reorg_threshold: int,
        max_age: float | None,
        budget: int,
    ) -> None:
        self._subscribe = subscribe
        self._order = order
        self._threshold = reorg_threshold
        self._max_age = max_age
        self._budget = budget

    def init(self, handle: StatefulProcessorHandle) -> None:
        """Called by Spark in each task."""
        self._numbers = handle.getValueState("numbers", "serial BIGINT, fresh BIGINT")
        self._held = handle.getMapState(
            "held",
            "node BINARY",
            "messages ARRAY<STRUCT<serial: BIGINT, key: BINARY, value: BINARY, source: STRING, "
            "position: BIGINT, since: DOUBLE>>",
        )
        self._known = handle.getMapState(
            "known", "number BIGINT", "id BINARY, prefixes ARRAY<BINARY>, kept BIGINT"
        )
        # Apart from the names, as it is longer, and read where something comes late.
        self._given = handle.getMapState("given", "number BIGINT", "messages BINARY")

    def handleInputRows(  # noqa: N802
        self,
        key: Any,
        rows: Iterator[Row],
        timerValues: TimerValues,  # noqa: N803
    ) -> Iterator[Row]:
        """A batch's messages of one lane."""
        lane = self._load()
        run = self._run(lane)
        for event in run.dropped:
            yield as_row(event)
        for row in sorted(rows, key=self._place):
            # Spark may give a bytearray, if it is told to.
            own_key = None if row.key is None else bytes(row.key)
            for event in run.take(own_key, bytes(row.value), row.source, row.position, row.now):
                yield as_row(event)
        self._save(lane)

    def close(self) -> None:
        """Called by Spark at a task's end."""

    def _run(self, lane: Lane) -> Run:
        return Run(lane, self._subscribe, self._max_age, self._budget, self._read)

    def _read(self, number: int) -> bytes:
        found = self._given.getValue((number,))
        assert found is not None, "what is kept of a payload is in the state"
        return bytes(found[0])

    def _place(self, row: Row) -> tuple[Any, ...]:
        """What rows are sorted by: nothing comes before anything, as in Spark."""
        return tuple(
            (value is not None, value)
            for value in (row[name] for name in (*self._order, "key", "value"))
        )

    def _load(self) -> Lane:
        lane = Lane()
        if self._numbers.exists():
            lane.serial, lane.fresh = self._numbers.get() or (0, 0)
        for (own,), (found,) in self._held.iterator():
            messages = [
                Held(serial, bytes(key), bytes(value), *rest) for serial, key, value, *rest in found
            ]
            lane.held[bytes(own)] = {held.key: held for held in messages}
        known = {number: found for (number,), found in self._known.iterator()}
        for number in sorted(known):
            own, prefixes, kept = known[number]
            lane.known[number] = DeliveredPayload(bytes(own), tuple(map(bytes, prefixes)), kept)
        lane.stored = {*lane.held, *lane.known}
        return lane

    def _save(self, lane: Lane) -> None:
        forget(lane, self._threshold, self._budget)
        self._numbers.update((lane.serial, lane.fresh))
        for own in lane.touched:
            of_node = lane.held.get(own)
            if of_node:
                self._held.updateValue((own,), ([tuple(held) for held in of_node.values()],))
            elif own in lane.stored:
                self._held.removeKey((own,))
        for number in lane.forgotten:
            if number in lane.stored:
                self._known.removeKey((number,))
                self._given.removeKey((number,))
        for number in lane.thinned:
            if number in lane.stored:
                self._given.removeKey((number,))
        for number in {*lane.added, *lane.thinned}:
            if number in lane.known:
                own_id, prefixes, kept = lane.known[number]
                self._known.updateValue((number,), (own_id, list(prefixes), kept))
        for number, messages in lane.given.items():
            self._given.updateValue((number,), (messages,))


def as_row(event: Event) -> Row:
    """An event as Spark takes it from a row's processor."""
    row = dict(zip(TOLD.names, row_of(event), strict=True))
    if row["parts"] is not None:
        row["parts"] = [Row(key=key, value=value) for key, value in row["parts"]]
    return Row(**row)
