"""Which entry was the first at or after a time: the cases, by hand."""

from __future__ import annotations

from pathlib import Path

import pytest

from datastreamer import DataStream
from datastreamer.errors import TimeUnknown, UnknownEntry
from datastreamer.format import page_start
from tests.storage.made import make
from tests.storage.summaries.oracle import UNKNOWN, records
from tests.storage.summaries.worlds import BEGIN, World

SIZE = 300_000


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    return World(tmp_path, monkeypatch, sync="os")


def test_an_empty_stream(world: World) -> None:
    assert world.stream.entry_at(BEGIN) == 0
    assert world.stream.time_marks(0, 5) == ([], 0, 0)
    with pytest.raises(UnknownEntry):
        world.stream.time_of(0)


def test_between_marks(world: World) -> None:
    for after in (0, 5000, 500, 400, 100):
        world.clock.now += after
        world.commit((1, b"x"))
    # Commits at 0, 5000, 5500, 5900 and 6000; marks at 0, 5000 and 6000.
    stream = world.stream
    assert stream.time_marks(0, 9) == ([(0, BEGIN), (1, BEGIN + 5000), (4, BEGIN + 6000)], 1000, 5)
    found = [stream.entry_at(BEGIN + ms) for ms in (-1, 0, 1, 999, 1000, 4999, 5000)]
    assert found == [0, 0, 0, 0, 1, 1, 1]
    found = [stream.entry_at(BEGIN + ms) for ms in (5001, 5999, 6000, 6001, 6999, 7000, 10**9)]
    assert found == [1, 1, 4, 4, 4, 5, 5]
    assert [stream.time_of(entry) for entry in range(5)] == [
        BEGIN + ms for ms in (0, 5000, 5000, 5000, 6000)
    ]


def test_over_pages(world: World) -> None:
    for _ in range(20):
        world.commit((1, bytes(SIZE)), (1, b"x"))
        world.clock.now += 700
    stream = world.stream
    for entry in range(0, 40, 2):
        time = BEGIN + entry * 350
        assert entry - 2 <= stream.entry_at(time) <= entry
        assert time - 1000 < (stream.time_of(entry + 1) or 0) <= time


def test_some_marks_at_a_time(world: World) -> None:
    for _ in range(20):
        world.commit((1, bytes(SIZE // 2)), (1, b"x"))
        world.clock.now += 1000
    everything = world.stream.time_marks(0, 99)
    assert everything.marks == [(2 * at, BEGIN + 1000 * at) for at in range(20)]
    assert everything.next == 40
    at, found = 0, []
    while at < 40:
        marks, resolution, following = world.stream.time_marks(at, 3)
        assert resolution == 1000
        assert marks[0][0] <= at < following
        found += marks
        at = following
    assert found == everything.marks
    assert world.stream.time_marks(7, 1) == ([(6, BEGIN + 3000)], 1000, 8)
    assert world.stream.time_marks(40, 5) == ([], 0, 40)


def test_nothing_is_known(tmp_path: Path) -> None:
    path = make(tmp_path / "s.bin", [(1, b"one")])
    path.with_name("s.bin.pages").unlink()
    with DataStream.open(path, read_only=True) as stream:
        with pytest.raises(TimeUnknown) as caught:
            stream.entry_at(BEGIN)
        assert str(caught.value) == (
            f"{path}: it is not known which entry was committed first at or after "
            "2001-09-09T01:46:40.000Z: no entry's time is known"
        )
        assert (caught.value.before, caught.value.after) == (None, None)
        assert stream.time_marks(0, 9) == ([], 0, 0)


def test_before_what_is_known(tmp_path: Path, world: World) -> None:
    world.append_as_others_do(*[(1, bytes(SIZE))] * 8)
    world.clock.now += 1000
    world.commit((1, b"x"))
    stream = world.stream
    with pytest.raises(TimeUnknown) as caught:
        stream.entry_at(BEGIN + 1000)
    assert str(caught.value).endswith(
        "the nearest known times are those of entry 8, of 2001-09-09T01:46:41.000Z"
    )
    assert (caught.value.before, caught.value.after) == (None, (8, BEGIN + 1000))
    assert stream.entry_at(BEGIN + 1001) == 8
    assert stream.entry_at(BEGIN + 2000) == 9
    assert stream.time_of(7) is None
    assert stream.time_marks(0, 9) == ([(8, BEGIN + 1000)], 1000, 9)


def test_between_what_is_known(world: World) -> None:
    world.commit((1, b"x"))
    world.append_as_others_do(*[(1, bytes(SIZE))] * 12)
    assert world.stream.entry_at(BEGIN + 999) == 0
    assert world.stream.time_of(1) is None
    world.clock.now += 10_000
    world.commit(*[(1, bytes(SIZE))] * 4)
    world.work()
    first, *others = records(world.path)
    assert first is not None
    assert first.marks == [(0, BEGIN), (1, UNKNOWN)]
    assert [it and it.marks[:1] for it in others] == [
        *([], [], []),
        [(13, BEGIN + 10_000)],
        [(16, BEGIN + 10_000)],
    ]
    for ms in (1000, 9999, 10_000):
        with pytest.raises(TimeUnknown) as caught:
            world.stream.entry_at(BEGIN + ms)
        assert caught.value.before == (0, BEGIN)
        assert caught.value.after == (13, BEGIN + 10_000)
    assert "those of entry 0, of " in str(caught.value)
    assert " and entry 13, of " in str(caught.value)
    assert world.stream.entry_at(BEGIN + 10_001) == 16
    assert world.stream.time_marks(0, 9) == ([(0, BEGIN)], 1000, 1)
    assert world.stream.time_marks(1, 9).marks == [(13, BEGIN + 10_000), (16, BEGIN + 10_000)]


def test_after_what_is_known(world: World) -> None:
    """A program that says no times goes on: whatever is in the last two pages may be on its way."""
    world.commit((1, b"x"))
    world.stream.close()
    world.append_as_others_do(*[(1, bytes(SIZE))] * 3)
    world.stream.close()
    with DataStream.open(world.path, read_only=True) as stream:
        assert stream.entry_at(BEGIN + 1000) == 1
    world.append_as_others_do(*[(1, bytes(SIZE))] * 9)
    assert world.stream.entry_at(BEGIN + 1000) == 1  # a writer of ours is at work
    world.stream.close()
    with DataStream.open(world.path, read_only=True) as stream:
        with pytest.raises(TimeUnknown):
            stream.entry_at(BEGIN + 1000)
        assert stream.entry_at(BEGIN + 999) == 0


# The times of a relay.


@pytest.mark.parametrize("most", [1, 3, 99])
def test_a_relay_takes_the_times_over(most: int, world: World, tmp_path: Path) -> None:
    for _ in range(20):
        world.commit((1, bytes(SIZE // 2)), (1, b"x"))
        world.clock.now += 700
    upstream = world.stream
    with DataStream.create(tmp_path / "relay.bin", index="memory", sync="os") as relay:
        part = relay.parts.relay
        part.leave_times()
        for number in range(40):
            relay.append(1, upstream.entry(number).data)
            if number % 7 == 6 or number == 39:
                while part.times_known_to < relay.total_entries:
                    found = upstream.time_marks(part.times_known_to, most)
                    part.put_time_marks(*found)
                assert relay.time_of(number) is not None
            elif number % 7 == 3:
                assert relay.time_of(number) is None
                if number > 7:
                    assert relay.entry_at(BEGIN + 10**9) == number - 3
        check_relay(world, relay)
    with DataStream.open(tmp_path / "relay.bin", index="memory") as relay:
        relay.parts.relay.leave_times()
        check_relay(world, relay)


def check_relay(world: World, relay: DataStream) -> None:
    for number in range(40):
        assert relay.time_of(number) == world.stream.time_of(number)
    for ms in range(BEGIN - 700, world.clock.now + 2000, 350):
        found = relay.entry_at(ms)
        truth = next((at for at, time in enumerate(world.times) if time >= ms), 40)
        assert found <= truth
        assert all(time > ms - 1000 for time in world.times[found:truth])


def test_a_relay_with_other_pages(world: World, tmp_path: Path) -> None:
    """It was truncated, or a page is sealed: entries are in other pages than upstream."""
    for _ in range(12):
        world.commit((1, b"x"))
        world.clock.now += 300
        world.commit((1, bytes(SIZE)))
        world.clock.now += 300
    with DataStream.create(tmp_path / "relay.bin", index="memory", sync="os") as relay:
        part = relay.parts.relay
        part.leave_times()
        with relay.atomic_op() as op:
            for entry in world.stream.entries():
                op.add_entry(1, entry.data)
                op.add_entry(1, entry.data) if False else None
        part.put_time_marks(*world.stream.time_marks(0, 5))
        assert part.times_known_to < 24
        part.put_time_marks(*world.stream.time_marks(part.times_known_to, 99))
        assert part.times_known_to == 24
        for ms in range(BEGIN - 700, world.clock.now + 2000, 100):
            found = relay.entry_at(ms)
            truth = next((at for at, time in enumerate(world.times) if time >= ms), 24)
            assert found <= truth
            assert all(time > ms - 2000 for time in world.times[found:truth])


def test_an_upstream_that_knows_nothing(tmp_path: Path) -> None:
    with DataStream.create(tmp_path / "relay.bin", index="memory", sync="os") as relay:
        relay.parts.relay.leave_times()
        relay.append(1, b"x")
        relay.parts.relay.put_time_marks([], 0, 0)
        assert relay.time_of(0) is None
        assert relay.parts.relay.times_known_to == 0
        with pytest.raises(TimeUnknown):
            relay.entry_at(BEGIN)


@pytest.mark.parametrize("wrong", [5, 50, 2**63])
def test_times_of_a_damaged_page(tmp_path: Path, wrong: int) -> None:
    """A relay notes times beside a page whose first entry cannot be read."""
    path = tmp_path / "s.bin"
    with DataStream.create(path) as stream:
        stream.parts.relay.leave_times()
        for number in range(12):
            stream.append(1, bytes([number]) * SIZE)
    at = page_start(2) + 9
    with path.open("r+b") as file:
        file.seek(at)
        good = file.read(8)
        first = int.from_bytes(good, "big")
        file.seek(at)
        file.write(wrong.to_bytes(8, "big"))
        file.flush()
        with DataStream.open(path) as stream:
            stream.parts.relay.leave_times()
            stream.parts.relay.put_time_marks([(first + 1, BEGIN)], 1000, 12)
            file.seek(at)
            file.write(good)
            file.flush()
            known = [stream.time_of(number) for number in range(12)]
    assert set(known) <= {None, BEGIN, BEGIN + 999}
