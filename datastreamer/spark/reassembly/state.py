"""The state of a streaming reassembly: what a lane keeps between batches.

Owns the messages in flight and the delivered payloads. `Lane` holds them without Spark;
`LaneProcessor` keeps them in Spark's state store. The core owns the meaning of messages: each
batch replays a lane's messages in flight into a new `Reassembler`, in the order of arrival.
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
from datastreamer.spark.reassembly.duplicates import MessageHashes, hash_messages
from datastreamer.spark.reassembly.event_rows import EVENT_SCHEMA, SHOWN, row_of, without_key

STATE_SETTINGS: Final = {
    "spark.sql.streaming.stateStore.providerClass": (
        "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider"
    )
}
"""Settings that a session needs for streaming reassembly."""

_HEADERS: Final = (b"\x00", b"\xff")


class Held(NamedTuple):
    """A message in flight. `serial` orders messages by arrival; `since` is the arrival time."""

    serial: int
    key: bytes
    value: bytes
    source: str
    position: int | None
    since: float


class DeliveredPayload(NamedTuple):
    """A delivered payload, and the size of the hashes that are kept of its messages."""

    id: bytes
    prefixes: tuple[bytes, ...]
    kept: int


@dataclass
class Lane:
    """The state of a lane between batches.

    `held` has the messages in flight by the first 33 bytes of their keys, then by key; `known` the
    delivered payloads by serial number, `hashes` the message hashes of those that this batch
    delivered. `touched`, `added`, `stripped` (of their hashes) and `forgotten` list what changed
    since the state was loaded, `stored` what it held then.
    """

    serial: int = 0
    fresh: int = 0
    held: dict[bytes, dict[bytes, Held]] = field(default_factory=dict)
    known: dict[int, DeliveredPayload] = field(default_factory=dict)
    hashes: dict[int, bytes] = field(default_factory=dict)
    touched: set[bytes] = field(default_factory=set)
    forgotten: list[int] = field(default_factory=list)
    stripped: list[int] = field(default_factory=list)
    added: list[int] = field(default_factory=list)
    stored: set[bytes | int] = field(default_factory=set)


class LaneBatch:
    """One batch of a lane: a `Reassembler` that has received all messages in flight.

    `read` returns the hashes of a payload that an earlier batch delivered.
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
        self._hashes: dict[int, MessageHashes] = {}
        self._subscribe = subscribe
        self._core = Reassembler(
            subscribe,
            reorg_threshold=U32_MAX,
            budget=budget,
            max_age=max_age,
            resume=Checkpoint({}, {}, [(one.id, one.prefixes) for one in lane.known.values()]),
        )
        # Of earlier batches only; the core itself compares with what this batch delivers.
        self._before = {
            own: number
            for number, one in lane.known.items()
            for own in (b"\x00" + one.id, *one.prefixes)
        }
        self._done = set(self._before)
        self.dropped: list[Event] = []
        """What does not fit the budget, which may be smaller than in the previous run."""
        held = [held for of_node in lane.held.values() for held in of_node.values()]
        for message in sorted(held):
            events = self._core.receive(
                message.key, message.value, message.source, message.position, message.since
            )
            # All other events were reported when the message arrived.
            self.dropped += [event for event in events if isinstance(event, Dropped)]
        for event in self.dropped:
            self._update(event)

    def receive(
        self,
        key: bytes | None,
        value: bytes,
        source: str | None,
        position: int | None,
        now: float,
    ) -> Iterator[Event]:
        """Process a message; returns its events."""
        source = source or ""
        # First drop what is too old, which may be of the same payload.
        yield from self.expire(now)
        if key is None:
            yield without_key(value, source, position)
            return
        events = self._core.receive(key, value, source, position, now)
        own = key[:PREFIX_SIZE]
        if own not in self._done and not self._rejected(events, key):
            of_node = self._lane.held.setdefault(own, {})
            if key not in of_node:
                of_node[key] = Held(self._lane.serial, key, value, source, position, now)
                self._lane.serial += 1
                self._lane.touched.add(own)
        if not events and own in self._before:
            hashes = self._hashes_of(self._before[own])
            late = None if hashes is None else hashes.event(key, value, source, position)
            if late is not None:
                yield late
        for event in events:
            self._update(event)
            yield event

    def _hashes_of(self, number: int) -> MessageHashes | None:
        known = self._lane.known[number]
        if known.kept and number not in self._hashes:
            self._hashes[number] = MessageHashes(known.id, known.prefixes, self._read(number))
        return self._hashes.get(number)

    def expire(self, now: float) -> Iterator[Event]:
        """Drop what is too old at this time."""
        for event in self._core.expire(now):
            self._update(event)
            yield event

    @staticmethod
    def _rejected(events: Sequence[Event], key: bytes) -> bool:
        """Whether the core rejected this message; events without a source are of messages that had
        waited for their header."""
        return any(
            event.source is not None and event.key == key[:SHOWN]
            for event in events
            if isinstance(event, Malformed)
            or (isinstance(event, Conflict) and event.what != "count")
        )

    def _update(self, event: Event) -> None:
        """Release the messages that the core has released."""
        if isinstance(event, PayloadComplete):
            kept = self._hash(event)
            self._release([b"\x00" + event.id, *event.prefixes])
            self._done.update((b"\x00" + event.id, *event.prefixes))
            number = next(reversed(self._lane.known), -1) + 1
            self._lane.known[number] = DeliveredPayload(event.id, event.prefixes, len(kept))
            self._lane.hashes[number] = kept
            self._lane.added.append(number)
            self._lane.fresh += 1
        elif isinstance(event, Dropped) and event.payload is not None:
            self._release(self._announced(b"\x00" + event.payload))
        elif isinstance(event, Dropped):
            assert event.prefix is not None
            self._release([event.prefix])
        elif event.source is None and (
            isinstance(event, Malformed) or (isinstance(event, Conflict) and event.what != "count")
        ):
            # The message had waited for its header, which then rejected it.
            own = event.key[:PREFIX_SIZE]
            of_node = self._lane.held.get(own, {})
            for key in [key for key in of_node if key[:SHOWN] == event.key]:
                del of_node[key]
                self._lane.touched.add(own)

    def _hash(self, event: PayloadComplete) -> bytes:
        held = self._lane.held
        [header] = held[b"\x00" + event.id].values()
        messages = {
            prefix: [(one.key, one.value) for one in held.get(prefix, {}).values()]
            for prefix in event.prefixes
        }
        return hash_messages(header.value, event.prefixes, messages)

    def _release(self, nodes: Iterable[bytes]) -> None:
        for own in nodes:
            if self._lane.held.pop(own, None) is not None:
                self._lane.touched.add(own)

    def _announced(self, header: bytes) -> list[bytes]:
        """The nodes of a payload that its headers announce."""
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
    """Forget the older generation of payloads once the younger one exceeds the threshold, and the
    hashes of the oldest payloads beyond `budget` bytes."""
    if lane.fresh > threshold:
        for number in list(lane.known)[: len(lane.known) - lane.fresh]:
            del lane.known[number]
            lane.hashes.pop(number, None)
            lane.forgotten.append(number)
        lane.fresh = 0
    kept = sum(one.kept for one in lane.known.values())
    for number, one in lane.known.items():
        if kept <= budget:
            break
        if one.kept:
            kept -= one.kept
            lane.known[number] = one._replace(kept=0)
            lane.hashes.pop(number, None)
            lane.stripped.append(number)


class LaneProcessor(StatefulProcessor):
    """The lanes of a streaming query, each under its own key in Spark's state store."""

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
        """Spark calls this in each task."""
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
        # Apart from "known", since they are larger and only read for late messages.
        self._hashes = handle.getMapState("given", "number BIGINT", "messages BINARY")

    def handleInputRows(  # noqa: N802
        self,
        key: Any,
        rows: Iterator[Row],
        timerValues: TimerValues,  # noqa: N803
    ) -> Iterator[Row]:
        """Process a batch's messages of one lane."""
        lane = self._load()
        batch = LaneBatch(lane, self._subscribe, self._max_age, self._budget, self._read)
        for event in batch.dropped:
            yield as_row(event)
        for row in sorted(rows, key=self._order_of):
            # Spark gives a bytearray under some settings.
            own_key = None if row.key is None else bytes(row.key)
            for event in batch.receive(
                own_key, bytes(row.value), row.source, row.position, row.now
            ):
                yield as_row(event)
        self._save(lane)

    def close(self) -> None:
        """Spark calls this at the end of a task."""

    def _read(self, number: int) -> bytes:
        found = self._hashes.getValue((number,))
        assert found is not None, "the state holds the hashes of a payload with kept > 0"
        return bytes(found[0])

    def _order_of(self, row: Row) -> tuple[Any, ...]:
        """The sort key of a row: nulls first, as in Spark."""
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
                self._hashes.removeKey((number,))
        for number in lane.stripped:
            if number in lane.stored:
                self._hashes.removeKey((number,))
        for number in {*lane.added, *lane.stripped}:
            if number in lane.known:
                own_id, prefixes, kept = lane.known[number]
                self._known.updateValue((number,), (own_id, list(prefixes), kept))
        for number, messages in lane.hashes.items():
            self._hashes.updateValue((number,), (messages,))


class PandasLaneProcessor(LaneProcessor):
    """The same for Spark 4.0, which passes frames of pandas: with a message in one column, since
    pandas makes floats of integers beside nulls."""

    def handleInputRows(  # noqa: N802
        self,
        key: Any,
        rows: Iterator[Any],
        timerValues: TimerValues,  # noqa: N803
    ) -> Iterator[Any]:
        """Process a batch's messages of one lane."""
        import pandas as pd

        given = (Row(**dict(it)) for frame in rows for it in frame["message"])
        found = [tuple(row) for row in super().handleInputRows(key, given, timerValues)]
        yield pd.DataFrame(found, columns=EVENT_SCHEMA.names, dtype=object)


def as_row(event: Event) -> Row:
    """An event as the row that Spark expects from a stateful processor."""
    row = dict(zip(EVENT_SCHEMA.names, row_of(event), strict=True))
    if row["parts"] is not None:
        row["parts"] = [Row(key=key, value=value) for key, value in row["parts"]]
    return Row(**row)
