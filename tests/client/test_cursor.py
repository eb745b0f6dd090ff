"""Iterations that keep their place: what is saved when, and where the next run begins."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from datastreamer._codec import Entry
from datastreamer.client.blocking_client import BlockingClient
from datastreamer.errors import CursorFailed, HistoryChanged, UsageError
from datastreamer.position import Identity, Position
from datastreamer.protocol.commands import HeaderQuery, Start
from datastreamer.protocol.history import Trail
from datastreamer.protocol.resume import Rollback
from datastreamer.storage.cursors import FileCursor
from tests.client.test_faults import client_behind
from tests.client.test_resume import THOUSAND, Closing, rewritten, seen_of
from tests.client.test_resume_every_client import behind, client_of
from tests.network.proxy import NONE
from tests.network.stub import Stub, sample


class Memory:
    """Keeps positions, and all that there were."""

    def __init__(self, position: Position | None = None) -> None:
        self.saved: list[Position] = []
        self.position = position

    def load(self) -> Position | None:
        return self.position

    def save(self, position: Position) -> None:
        self.position = position
        self.saved.append(position)

    @property
    def numbers(self) -> list[int]:
        return [position.next_entry for position in self.saved]


async def test_a_path_is_no_cursor() -> None:
    async with client_behind((Closing(THOUSAND), NONE)) as (client, _):
        path: Any = "position.json"
        with pytest.raises(UsageError, match=r"FileCursor\('position.json'\)"):
            client.entries(cursor=path)


async def test_a_batch_is_done_with_when_the_next_is_asked_for() -> None:
    cursor = Memory()
    stubs = [(Closing(THOUSAND[:n]), NONE) for n in (100, 200, 300)]
    async with client_behind(*stubs) as (client, _):
        at: list[tuple[int, list[int]]] = []
        async with client.batches(cursor=cursor) as batches:
            async for batch in batches:
                at.append((batch.next_number, cursor.numbers))
                if batch.next_number == 300:
                    break
        assert at == [(100, []), (200, [100]), (300, [100, 200])]
        assert cursor.numbers == [100, 200, 300]
        assert cursor.saved[-1].stream == Identity(2, 137, 1)
        assert len(cursor.saved[0].trail) == 800
        assert len(cursor.saved[2].trail) == 2048


async def test_what_failed_is_not_done_with() -> None:
    cursor = Memory()
    async with client_behind((Stub(THOUSAND), NONE)) as (client, _):
        for items, last in (
            (client.batches(stop=1000, cursor=cursor), 0),
            (client.entries(stop=1000, cursor=cursor), 7),
        ):
            with pytest.raises(RuntimeError):
                await fail_at(items, last)
            assert cursor.saved == []


async def fail_at(items: Any, last: int) -> None:
    async with items:
        async for item in items:
            if getattr(item, "number", last) == last:
                raise RuntimeError


async def test_within_a_run_the_entry_that_was_handed_out_last_counts() -> None:
    cursor = Memory()
    async with client_behind((Stub(THOUSAND), NONE)) as (client, _):
        for last in (7, 8, 399):
            async with client.entries(cursor=cursor) as entries:
                async for entry in entries:
                    if entry.number == last:
                        break
            assert cursor.numbers[-1] == last + 1
        assert cursor.saved[-1].trail == trail_of(THOUSAND[144:400])
        rest: list[Entry] = []
        await seen_of(client.entries(stop=1000, cursor=cursor), rest)
        assert rest == THOUSAND[400:]
        assert [number for number in cursor.numbers if number < 401] == [8, 9, 363, 400]
        assert cursor.numbers[-1] == 1000


def trail_of(entries: list[Entry]) -> bytes:
    from datastreamer._codec import scan

    trail = Trail(entries[0].number)
    trail.extend(scan(b"".join(entry.pack() for entry in entries)))
    return trail.hashes


async def test_the_next_run_continues_after_comparing_its_last_entries() -> None:
    stub = Stub(THOUSAND)
    cursor = Memory(Position(600, trail_of(THOUSAND[344:600]), Identity(2, 137, 1)))
    async with client_behind((stub, NONE)) as (client, _):
        seen: list[Entry] = []
        await seen_of(client.batches(from_entry=3, stop=1000, cursor=cursor), seen)
        assert seen == THOUSAND[600:]
        assert stub.seen[:2] == [HeaderQuery(), Start(344)]
        assert cursor.numbers[-1] == 1000
        await seen_of(client.batches(stop=1000, cursor=cursor), seen)
        assert seen == THOUSAND[600:]


async def test_a_position_without_a_trail_is_believed() -> None:
    async with client_behind((Stub(THOUSAND), NONE)) as (client, _):
        seen: list[Entry] = []
        await seen_of(client.batches(stop=1000, cursor=Memory(Position(600))), seen)
        assert seen == THOUSAND[600:]


@pytest.mark.parametrize(
    "position, message",
    [
        (Position(600, trail_of(THOUSAND[344:600]), Identity(2, 138, 1)), "another stream"),
        (Position(1001, b"", Identity(2, 137, 1)), "entry 1001 is the next one needed"),
        (Position(1003, trail_of(THOUSAND[747:]) + bytes(24)), "entries 1000 to 1002, .* missing"),
        (Position(600, trail_of(THOUSAND[344:599]) + bytes(8)), "entry 599 is not the one"),
        (Position(600, bytes(2048)), "all of entries 344 to 599 differ"),
    ],
)
async def test_a_history_that_changed_between_two_runs(position: Position, message: str) -> None:
    cursor = Memory(
        Position(position.next_entry, position.trail[-2048:], position.stream)
        if len(position.trail) <= 2048
        else None
    )
    async with client_behind((Stub(THOUSAND), NONE)) as (client, _):
        with pytest.raises(HistoryChanged, match=message):
            await seen_of(client.batches(cursor=cursor), [])
        assert cursor.saved == []


async def test_a_rollback_between_two_runs() -> None:
    cursor = Memory(Position(600, trail_of(THOUSAND[344:600]), Identity(2, 137, 1)))
    other = rewritten(THOUSAND, 550, 560)
    rollbacks: list[Rollback] = []
    async with client_behind((Stub(other), NONE)) as (client, _):
        seen: list[Entry] = []
        async with client.batches(
            stop=1000, cursor=cursor, on_rollback=rollbacks.append
        ) as batches:
            await seen_of(batches, seen)
        assert seen == other[550:]
        assert (cursor.numbers[0], cursor.numbers[-1]) == (550, 1000)
        assert [rollback.position for rollback in rollbacks] == [cursor.saved[0]]
        assert cursor.saved[0].trail == trail_of(THOUSAND[344:550])


async def test_a_rollback_that_the_caller_fails_at_is_not_kept() -> None:
    place = Position(600, trail_of(THOUSAND[344:600]), Identity(2, 137, 1))

    def fail(rollback: Rollback) -> None:
        raise RuntimeError

    for enter in (True, False):
        cursor = Memory(place)
        async with client_behind((Stub(rewritten(THOUSAND, 550, 560)), NONE)) as (client, _):
            batches = client.batches(stop=1000, cursor=cursor, on_rollback=fail)
            if enter:
                async with batches:
                    pass
            else:
                with pytest.raises(RuntimeError):
                    await batches.__anext__()
            assert cursor.saved == []


async def test_the_position_passes_entries_of_other_types_too() -> None:
    cursor = Memory()
    stubs = [(Closing(THOUSAND[:n]), NONE) for n in (100, 200, 300)]
    async with client_behind(*stubs, (Stub(THOUSAND), NONE)) as (client, _):
        async with client.batches(types={99}, stop=1000, cursor=cursor) as batches:
            assert [batch async for batch in batches] == []
        assert cursor.numbers[:3] == [100, 200, 300]
        assert cursor.numbers[-1] == 1000


async def test_a_store_that_fails_ends_the_iteration() -> None:
    class Full(Memory):
        def save(self, position: Position) -> None:
            raise CursorFailed("cursor", "cannot be written: full")

    async with client_behind((Stub(THOUSAND), NONE)) as (client, _):
        with pytest.raises(CursorFailed):
            async with client.batches(stop=1000, cursor=Full()) as batches:
                await seen_of(batches, [])
        assert await client.entry(3) == THOUSAND[3]


def test_the_blocking_client(tmp_path: Path) -> None:
    cursor = FileCursor(tmp_path / "cursor")
    seen: list[Entry] = []
    with behind(*[Stub(THOUSAND) for _ in range(6)]) as server:
        for last in (50, 99, 100, 450, 800):
            with client_of("blocking", server) as client, client.entries(cursor=cursor) as entries:
                for entry in entries:
                    seen.append(entry)
                    if entry.number == last:
                        break
            position = cursor.load()
            assert position is not None
            assert position.next_entry == last + 1
        with (
            client_of("blocking", server) as client,
            client.batches(stop=1000, cursor=cursor) as batches,
        ):
            for batch in batches:
                seen += batch
                assert batches.position is not None
                assert batches.position.next_entry == batch.next_number
    assert seen == THOUSAND
    position = cursor.load()
    assert position == batches.position


def test_killed_in_the_middle_nothing_is_missing(tmp_path: Path) -> None:
    cursor = FileCursor(tmp_path / "cursor")
    seen: list[int] = []
    begun: list[int] = []

    def process(client: BlockingClient, until: int) -> None:
        position = cursor.load()
        begun.append(0 if position is None else position.next_entry)
        with client.batches(cursor=cursor) as batches:
            for batch in batches:
                begun.append(batch.first_number)
                seen.extend(batch.numbers)
                if batch.next_number >= until:
                    raise KeyboardInterrupt

    ends = (100, 100, 200, 300, 300, 400, 500)
    with behind(*[Closing(THOUSAND[:end]) for end in ends]) as server:
        for until in (100, 300, 500):
            with client_of("blocking", server) as client, pytest.raises(KeyboardInterrupt):
                process(client, until)
            # It began where the run before had come to, but for the batch underway.
            assert begun[0] == begun[1]
            begun[:] = begun[-1:]
            position = cursor.load()
            assert (0 if position is None else position.next_entry) == begun.pop()
    assert sorted(set(seen)) == list(range(500))
    assert len(seen) > 500


def test_a_trail_is_bounded_and_exact() -> None:
    from datastreamer._codec import scan

    entries = sample(2000)
    for sizes in ([2000], [1] * 2000, [300, 1, 299, 1400], [255, 1, 1, 256, 600, 887]):
        trail, at = Trail(0), 0
        for size in sizes:
            trail.extend(scan(b"".join(e.pack() for e in entries[at : at + size])))
            at += size
        assert trail.next_number == 2000
        assert trail.first_number == 1744
        assert trail.hashes == trail_of(entries[1744:])
        trail.cut(1750)
        assert (trail.first_number, trail.next_number) == (1744, 1750)
        batch: Any = scan(b"".join(e.pack() for e in entries[1746:1750]))
        assert trail.first_difference(batch) is None
