"""Three producers as they are: each with losses, in an order of its own, one of which lies; and a
consumer that is killed again and again."""

from __future__ import annotations

import random
from typing import Any

import pytest

from datastreamer._codec import EntryBatch, scan
from datastreamer.reassembly import (
    Checkpoint,
    Conflict,
    PayloadComplete,
    Reassembler,
    Splitter,
    pack_message,
)
from tests.oracle import pack
from tests.reassembly.generated import name

PAYLOADS = 400
BATCH = 500
BUDGET = 8_000_000


def batches(messages: list[tuple[bytes, bytes]]) -> list[EntryBatch]:
    entries = [pack(at, 0x10, pack_message(*message)) for at, message in enumerate(messages)]
    return [scan(b"".join(entries[at : at + BATCH])) for at in range(0, len(entries), BATCH)]


@pytest.mark.slow
def test_each_payload_once_and_right() -> None:
    chance = random.Random(7)
    splitter = Splitter(150)
    truth: dict[bytes, dict[bytes, bytes]] = {}
    keys: dict[bytes, bytes] = {}
    sent: dict[str, list[tuple[float, tuple[bytes, bytes]]]] = {"a": [], "b": [], "liar": []}
    lies: set[bytes] = set()
    published_by_others: set[bytes] = set()
    for number in range(PAYLOADS):
        own = b"%032d" % number
        blob = chance.randbytes(chance.randrange(113 * 200))
        messages = splitter.split(own, {name(1, own[8:]): blob, name(2, own[8:]): [(b"", own)]})
        truth[own] = dict(messages[1:])
        for key, value in messages:
            keys[key] = own
            sources = [source for source in sent if chance.random() < 0.7]
            for source in sources or [chance.choice("ab")]:
                given = value
                if source == "liar" and key[0] in (1, 2) and chance.random() < 0.01:
                    given = value + b"!"
                    lies.add(key)
                elif source != "liar":
                    published_by_others.add(key)
                # Late by as much as a hundred payloads.
                sent[source].append((number + chance.uniform(0, 100), (key, given)))
    streams = {
        source: batches([message for _, message in sorted(found, key=lambda at: at[0])])
        for source, found in sent.items()
    }

    results: list[tuple[bytes, dict[bytes, bytes]]] = []
    conflicts: set[bytes] = set()
    stored = Checkpoint({}, {}, [])
    before: set[bytes] = set()
    for life in range(6):
        before.update(own for own, _ in results)
        reassembler = Reassembler(resume=stored, budget=BUDGET, reorg_threshold=200)
        at = {source: stored.positions.get(source, 0) for source in streams}
        steps = chance.randrange(20, 60) if life < 5 else 10**9
        while steps and (left := [s for s in streams if at[s] < BATCH * len(streams[s])]):
            steps -= 1
            source = chance.choice(left)
            batch, skipped = divmod(at[source], BATCH)
            at[source] = (batch + 1) * BATCH
            events: Any = reassembler.receive_batch(streams[source][batch][skipped:], source)
            for event in events:
                if isinstance(event, PayloadComplete):
                    results.append((event.id, dict(event.parts)))
                    stored = Checkpoint.from_json(reassembler.checkpoint().to_json())
                else:
                    assert isinstance(event, Conflict)
                    assert event.what == "value"
                    conflicts.add(event.key)
            stats = reassembler.stats()
            assert stats.used <= BUDGET
            assert stats.dropped == 0

    assert len(results) == PAYLOADS
    assert {own for own, _ in results} == set(truth)
    for own, parts in results:
        assert list(parts) == sorted(truth[own])
        assert {key for key, value in parts.items() if value != truth[own][key]} <= lies
    # A false message without a contradiction cannot be detected, nor one about a payload that the
    # run before had given out.
    missed = (lies & published_by_others) - conflicts
    assert conflicts <= lies & published_by_others
    assert {keys[key] for key in missed} <= before
    assert len(missed) < len(conflicts) / 10
    assert reassembler.stats().in_flight == 0
