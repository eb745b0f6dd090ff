"""Batches in which entries are missing, and empty ones: the same events and places as of all."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from datastreamer._codec import EntryBatch, scan, scan_chosen
from datastreamer.position import Position
from datastreamer.reassembly import Reassembler, Splitter, pack_message
from datastreamer.reassembly.merge import Merge
from datastreamer.reassembly.progress import ReassemblyProgress
from tests.oracle import pack

MESSAGE = 0x10
SUBSCRIBED = [b"\x01", b"\xff"]
SOURCES = ("a", "b")
Kept = tuple[int, bytes]


def stream_of(chance: random.Random, payloads: int) -> list[Kept]:
    """Types and data: messages of all payloads, some lost, sent twice or wrong, and other entries
    between."""
    made: list[tuple[float, Kept]] = []
    for number in range(payloads):
        own = b"%032d" % number
        parts = {
            bytes([kind]) + b"%02d" % at + own[2:]: [
                (bytes([place]), b"part %d" % place) for place in range(chance.randrange(4))
            ]
            for kind in (1, 2)
            for at in range(chance.choice([1, 1, 20]))
        }
        for key, value in Splitter(300).split(own, parts):
            for _ in range(chance.choice([0, 1, 1, 1, 1, 2])):
                wrong = b"!" if key[0] in (1, 2) and chance.random() < 0.03 else b""
                late = number + chance.uniform(0, 3)
                made.append((late, (MESSAGE, pack_message(key, value + wrong))))
    for _ in range(chance.randrange(3 * len(made) + 1)):
        kind = chance.choice([1, 0xB0])
        made.append((chance.uniform(0, payloads), (kind, b"key %d" % chance.randrange(99))))
    return [entry for _, entry in sorted(made)]


def is_wanted(entry: Kept) -> bool:
    kind, data = entry
    return kind == MESSAGE and data[2:3] in (b"\x00", b"\x01", b"\xff")


def whole(entries: list[Kept], first: int, stop: int) -> EntryBatch:
    return scan(b"".join(pack(at, *entries[at]) for at in range(first, stop)), first)


def with_gaps(entries: list[Kept], first: int, stop: int) -> EntryBatch:
    packed = b"".join(pack(at, *entries[at]) for at in range(first, stop) if is_wanted(entries[at]))
    return scan_chosen(packed, first, stop, start=0, end=len(packed))


Cut = Callable[[list[Kept], int, int], EntryBatch]


def history(cut: Cut, streams: dict[str, list[Kept]], chance: random.Random) -> Iterator[Any]:
    """Each event and the places at it, over runs that end anywhere: also within a batch."""
    kept = ReassemblyProgress()
    for _ in range(4):
        merge = Merge(SOURCES, SUBSCRIBED, resume=kept)
        at = {}
        for source in SOURCES:
            place = merge.source_progress(source)
            at[source] = 0 if place is None else max(0, place.position - chance.randrange(9))
        last = chance.randrange(60)
        events = 0
        while events < last and any(at[name] < len(streams[name]) for name in SOURCES):
            source = chance.choice(SOURCES)
            stop = min(len(streams[source]), at[source] + chance.randrange(40))
            batch = cut(streams[source], at[source], stop)
            at[source] = stop
            for event in merge.receive(source, batch, Position(stop)):
                events += 1
                yield event, places_of(merge)
                if events >= last and chance.random() < 0.5:
                    break
            else:
                yield source, stop, places_of(merge)
        reported = merge.progress()
        known = [*kept.known, *reported.known]
        known = known[max(0, len(known) - reported.known_count) :]
        kept = ReassemblyProgress({**kept.places, **reported.places}, known, len(known))


def places_of(merge: Merge) -> dict[str, tuple[int, int]]:
    return {name: (each.position, each.seen) for name, each in merge.progress().places.items()}


@given(st.integers(0, 2**32))
@settings(max_examples=200, deadline=None)
def test_what_is_missing_changes_nothing(seed: int) -> None:
    streams = {name: stream_of(random.Random(f"{seed} {name}"), 8) for name in SOURCES}
    expected = list(history(whole, streams, random.Random(seed)))
    assert list(history(with_gaps, streams, random.Random(seed))) == expected


def test_the_position_is_behind_what_is_missing() -> None:
    """An earlier run's position in a gap is reached too: then payloads are forgotten again."""
    own = b"%032d" % 7
    [header, part] = Splitter().split(own, {b"\x01" + own: b"part"})
    entries = [(MESSAGE, pack_message(*header)), (1, b""), (1, b""), (MESSAGE, pack_message(*part))]
    first = Reassembler()
    assert list(first.receive_batch(with_gaps(entries, 0, 3), "a")) == []
    assert list(first.receive_batch(with_gaps(entries, 3, 3), "b")) == []
    before = first.checkpoint()
    assert (before.positions, before.seen) == ({"a": 0}, {"a": 3})
    again = Reassembler(resume=before)
    assert again.replaying
    batch = with_gaps(entries, 0, 3)
    assert list(again.receive_batch(batch, "a")) == []
    assert not again.replaying
    assert len(list(again.receive_batch(with_gaps(entries, 3, 4), "a"))) == 1
    assert list(again.receive_batch(with_gaps([*entries, (1, b"")], 4, 5), "a")) == []
    assert again.positions() == {"a": 5}
