"""`FILE.pages` beside a stream that is written: when it is written, and what is in its way."""

from __future__ import annotations

import errno
import logging
import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from datastreamer import DataStream
from datastreamer.errors import TimeUnknown
from datastreamer.storage.disk.access import Access
from datastreamer.storage.maintain.check import verify
from datastreamer.storage.maintain.repair import repair
from datastreamer.storage.maintain.snapshot import snapshot
from datastreamer.storage.pages.keeper import SumsKeeper
from datastreamer.storage.write.opening import make_sums
from tests.storage.made import FIRST, PAGE, FaultyDisk, FaultyFile, page_sums, trace_of
from tests.storage.summaries.oracle import UNKNOWN, compare, records
from tests.storage.summaries.worlds import BEGIN, World

SIZE = 300_000


def fill(stream: DataStream, pages: int) -> None:
    """Operations of one entry, three to a page, until the stream has that many whole pages."""
    while stream.header.total_length <= FIRST + pages * PAGE:
        stream.append(1, stream.total_entries.to_bytes(4, "big") * (SIZE // 4))


def made(path: Path, pages: int = 3) -> Path:
    with DataStream.create(path, index="memory", sync="os") as stream:
        fill(stream, pages)
    return path


def sidecar(path: Path) -> Path:
    return path.with_name(path.name + ".pages")


def counted(path: Path, pages: int) -> bool:
    """Whether that many pages are counted, as they have to be, and the last one has marks."""
    found = records(path)
    if len(found) < pages or not all(page and page.flags & 1 for page in found[:pages]):
        return False
    return len(compare(path)) == pages + 1


def counts(path: Path) -> int:
    """How many pages have a summary."""
    return sum(page is not None and page.flags & 1 for page in records(path))


def eventually(condition: Callable[[], object]) -> None:
    until = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.01)


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    return World(tmp_path, monkeypatch, sync="os")


def test_by_the_machine_s_clock(tmp_path: Path) -> None:
    """Within two seconds after a commit its time is in the file, and a page is counted."""
    path, began = tmp_path / "s.bin", int(time.time() * 1000)
    with DataStream.create(path, index="memory", sync="os") as stream:
        stream.append(1, b"one")
        eventually(lambda: any(records(path)))
        (page,) = records(path)
        assert page is not None
        ((entry, ms),) = page.marks
        assert entry == 0
        assert began <= ms <= time.time() * 1000
        assert stream.time_of(0) == ms
        fill(stream, 2)
        eventually(lambda: counted(path, 2))
    assert len(compare(path)) == 3


def test_a_mark_a_second(world: World) -> None:
    for _ in range(250):
        world.commit((1, b"x"))
        world.clock.now += 100
    world.summaries.flush()
    (page,) = records(world.path)
    assert page is not None
    assert page.resolution == 1000
    assert page.marks == [(entry, BEGIN + entry * 100) for entry in range(0, 250, 10)]
    assert (page.first, page.entries, page.flags) == (0, 250, 0)
    assert page.covered == 250 * 18


def test_more_marks_than_a_record_holds(world: World) -> None:
    for _ in range(90):
        world.commit((1, b"x"))
        world.clock.now += 1000
    world.summaries.flush()
    (page,) = records(world.path)
    assert page is not None
    assert page.resolution == 2000
    assert page.marks == [(entry, BEGIN + entry * 1000) for entry in range(0, 90, 2)]
    world.commit((1, b"x"))  # 1 s after the last commit, 2 s after the last mark
    world.clock.now += 1000
    world.commit((1, b"x"))
    world.summaries.flush()
    (page,) = records(world.path)
    assert page is not None
    assert page.marks[-2:] == [(88, BEGIN + 88_000), (90, BEGIN + 90_000)]


def test_its_size(tmp_path: Path) -> None:
    path = made(tmp_path / "s.bin", 20)
    assert sidecar(path).stat().st_size == 512 + 21 * 1024
    assert sidecar(path).stat().st_size <= path.stat().st_size / 1000


def test_each_page_begins_with_a_mark(world: World) -> None:
    world.commit(*[(1, bytes(SIZE))] * 7)
    world.clock.now += 10
    world.commit((1, bytes(SIZE)), (1, bytes(SIZE)))
    world.close()
    found = records(world.path)
    assert [page and page.marks for page in found] == [
        [(0, BEGIN)],
        [(3, BEGIN)],
        [(6, BEGIN)],
    ]


def test_a_gap_before_the_next_writer(world: World) -> None:
    world.commit((1, b"one"))
    world.summaries.flush()
    world.clock.now += 500
    world.commit((1, b"two"))
    world.kill()
    assert world.stream.time_of(0) == BEGIN
    assert world.stream.time_of(1) is None
    assert world.stream.entry_at(BEGIN + 10**6) == 1
    world.summaries.flush()
    (page,) = records(world.path)
    assert page is not None
    assert page.marks == [(0, BEGIN), (1, UNKNOWN)]
    world.clock.now += 10**6
    world.commit((1, b"three"))
    late = BEGIN + 500 + 10**6
    assert [world.stream.time_of(entry) for entry in range(3)] == [BEGIN, None, late]
    for ms in (BEGIN + 1000, late):
        with pytest.raises(TimeUnknown) as caught:
            world.stream.entry_at(ms)
        assert (caught.value.before, caught.value.after) == ((0, BEGIN), (2, late))
    assert world.stream.entry_at(BEGIN + 999) == 0
    assert world.stream.entry_at(late + 1) == 2
    assert world.stream.time_marks(0, 9) == ([(0, BEGIN)], 1000, 1)
    assert world.stream.time_marks(1, 9) == ([(2, late)], 1000, 3)


def test_a_writer_that_is_there_again_within_a_second(world: World) -> None:
    world.commit((1, b"one"))
    world.summaries.flush()
    world.clock.now += 300
    world.commit((1, b"two"))
    world.kill()
    world.clock.now += 300
    world.commit((1, b"three"))
    assert world.stream.time_marks(0, 9) == ([(0, BEGIN)], 1000, 3)


def test_the_clock_goes_back(world: World) -> None:
    world.commit((1, b"one"))
    world.clock.now -= 10**6
    world.commit((1, b"two"))
    world.clock.now += 10**6 + 999
    world.commit((1, b"three"))
    world.clock.now += 1
    world.commit((1, b"four"))
    assert world.stream.time_marks(0, 10).marks == [(0, BEGIN), (3, BEGIN + 1000)]


def test_missing_ones_are_made(tmp_path: Path) -> None:
    path = made(tmp_path / "s.bin")
    compare(path)
    sidecar(path).unlink()
    with DataStream.open(path, index="memory"):
        eventually(lambda: counts(path) == 3)
        compare(path)
    sidecar(path).unlink()
    make_sums(path)
    assert [page and page.marks for page in compare(path)] == [[], [], []]
    os.unlink(f"{path}.sums")
    sidecar(path).unlink()
    make_sums(path)
    compare(path)


def test_removed_while_it_is_open(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = made(tmp_path / "s.bin")
    with DataStream.open(path, index="memory") as stream:
        stream.append(1, b"x")
        sidecar(path).unlink()
        assert stream.time_of(stream.total_entries - 1) is not None
        eventually(lambda: counted(path, 3))
    assert sum("made again" in message for message in caplog.messages) == 1


def test_an_update_and_a_replaced_page_keep_times(world: World) -> None:
    for _ in range(7):
        world.commit((2, b"\x08\x01" + bytes(SIZE)))
        world.clock.now += 2000
    before = world.stream.time_marks(0, 99)
    world.stream.update_entry(1, 2, b"\x08\x05" + bytes(SIZE))
    world.stream.update_entry(6, 2, b"\x08\x05" + bytes(SIZE))
    assert world.stream.time_marks(0, 99) == before
    world.work()
    compare(world.path)
    assert world.stream.time_marks(0, 99) == before


def test_a_truncation_keeps_the_times_of_what_remains(world: World) -> None:
    for _ in range(10):
        world.commit((1, bytes(SIZE)))
        world.clock.now += 2000
    world.work()
    marks = world.stream.time_marks(0, 99).marks
    for number in (8, 4, 3, 1, 0):
        world.truncate(number)
        assert world.stream.time_marks(0, 99).marks == marks[:number]
        found = records(world.path)
        assert len(found) == -(-number // 3)
    world.commit((1, b"again"))
    assert world.stream.time_of(0) == world.clock.now


def test_an_update_that_a_crash_undoes(tmp_path: Path) -> None:
    """The record is that of the old bytes: they are there again."""
    path = made(tmp_path / "s.bin")
    before, disk = records(path), FaultyDisk()
    states: list[Path] = []

    def keep() -> None:
        folder = tmp_path / f"state {len(states)}"
        folder.mkdir()
        for each in tmp_path.glob("s.bin*"):
            (folder / each.name).write_bytes(each.read_bytes())
        states.append(folder / "s.bin")

    with DataStream.open(path, index="memory", disk=disk) as stream:
        disk.before = {"write": keep, "sync": keep}
        stream.update_entry(4, 1, b"new!" * (SIZE // 4))
        disk.before = {}
    undone = 0
    for state in states:
        with DataStream.open(state, index="memory") as stream:
            if stream.entry(4).data[:4] != b"new!":
                undone += 1
                assert stream.time_of(4) is not None
            completer = stream._ensure_writable().sums_completer
            while completer.complete_page() or completer.count_page():
                pass
        compare(state)
    assert undone > 3
    assert before[0] is not None


class Refusing(FaultyDisk):
    """The sidecar cannot be opened, made or written."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.what = what

    def open(self, path: str, *, write: bool, beside: Access | None = None) -> FaultyFile:
        found = super().open(path, write=write, beside=beside)
        return self._refusing(found) if path.endswith(".pages") else found

    def create(self, path: str, beside: Access | None = None) -> FaultyFile:
        if path.endswith(".pages") and self.what == "create":
            raise PermissionError(errno.EACCES, "Permission denied", path)
        found = super().create(path, beside)
        return self._refusing(found) if path.endswith(".pages") else found

    def _refusing(self, file: FaultyFile) -> FaultyFile:
        def refuse(*_: object) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

        if self.what == "write":
            file.write = refuse  # type: ignore[method-assign]
        return file


@pytest.mark.parametrize("what", ["create", "write"])
def test_a_disk_that_refuses(what: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It is logged once, and the stream continues."""
    path = tmp_path / "s.bin"
    with (
        caplog.at_level(logging.WARNING),
        DataStream.create(path, index="memory", sync="os", disk=Refusing(what)) as stream,
    ):
        for _ in range(3):
            fill(stream, stream.total_entries // 3 + 1)
            assert stream.time_of(0) is None
        stream.update_entry(1, 1, bytes(SIZE))
        stream.truncate(5)
    assert [message for message in caplog.messages if ".pages" in message] == [
        f"{sidecar(path)} cannot be written ("
        + (
            f"[Errno 13] Permission denied: '{sidecar(path)}'"
            if what == "create"
            else "[Errno 28] No space left on device"
        )
        + "); what the pages hold and when their entries were committed is not recorded"
    ]
    assert len(page_sums(path)) == 1
    assert verify(path).ok


def elsewhere(path: Path) -> None:
    path.with_name("elsewhere").write_bytes(b"kept")
    path.symlink_to(path.with_name("elsewhere"))


@pytest.mark.parametrize("put", [elsewhere, Path.mkdir, os.mkfifo])
def test_what_is_in_its_place(
    put: Callable[[Path], object], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = made(tmp_path / "s.bin")
    sidecar(path).unlink()
    put(sidecar(path))
    before = os.lstat(sidecar(path))
    with DataStream.open(path, read_only=True) as stream:
        assert stream.time_of(0) is None
    with caplog.at_level(logging.WARNING), DataStream.open(path, index="memory") as stream:
        fill(stream, 4)
        stream.truncate(2)
        assert stream.time_of(0) is None
    assert sum(".pages" in message for message in caplog.messages) == 1
    assert os.lstat(sidecar(path)) == before
    assert verify(path).ok


def test_a_sidecar_of_another_stream(tmp_path: Path) -> None:
    path, other = made(tmp_path / "s.bin"), made(tmp_path / "o.bin")
    sidecar(path).write_bytes(sidecar(other).read_bytes())
    with DataStream.open(path, read_only=True) as stream:
        assert stream.time_of(0) is None
    make_sums(path)
    assert [page and page.marks for page in compare(path)] == [[], [], []]


def test_a_reader_writes_nothing(tmp_path: Path) -> None:
    path = made(tmp_path / "s.bin")
    sidecar(path).unlink()
    before = trace_of(tmp_path)
    with DataStream.open(path, read_only=True) as stream:
        assert stream.time_of(0) is None
        assert stream.time_marks(0, 5).marks == []
    assert trace_of(tmp_path) == before


def test_readers_without_proven_checksums(tmp_path: Path) -> None:
    path = made(tmp_path / "s.bin")
    content = bytearray(path.read_bytes())
    content[FIRST + PAGE + 100] ^= 1
    path.write_bytes(content)
    os.unlink(f"{path}.sums")
    with DataStream.open(path, read_only=True, verify="never") as stream:
        assert stream.time_of(0) is not None
        assert stream.time_of(4) is None


@pytest.mark.parametrize("size", [0, 20, 512, 512 + 20, 512 + 40, 512 + 1024 + 20, 512 + 3000])
def test_a_sidecar_that_is_cut_off(size: int, tmp_path: Path) -> None:
    path = made(tmp_path / "s.bin")
    sidecar(path).write_bytes(sidecar(path).read_bytes()[:size])
    with DataStream.open(path, index="memory"):
        eventually(lambda: counts(path) == 3)
    compare(path)


def test_a_damaged_page_is_not_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = made(tmp_path / "s.bin")
    sidecar(path).unlink()
    content = bytearray(path.read_bytes())
    content[FIRST + PAGE + 100] ^= 1
    path.write_bytes(content)
    make_sums(path)
    found = records(path)
    assert [bool(page and page.flags & 1) for page in found] == [True, False, True]
    content[FIRST + PAGE + 100] ^= 1
    path.write_bytes(content)
    make_sums(path)
    compare(path)


def test_a_snapshot_has_the_times(tmp_path: Path, world: World) -> None:
    for _ in range(8):
        world.commit((1, bytes(SIZE)))
        world.clock.now += 2000
    out = tmp_path / "out.bin"
    made(out, 0)  # leaves a sidecar of another stream
    out.unlink()
    for copy in (lambda: world.stream.snapshot(out), lambda: snapshot(world.path, out)):
        copy()
        with DataStream.open(out, read_only=True) as stream:
            assert stream.time_marks(0, 99) == world.stream.time_marks(0, 99)
        out.unlink()
    sidecar(out).write_bytes(b"mine")
    snapshot(world.path, out)
    assert sidecar(out).read_bytes() == b"mine"


def test_a_repair_keeps_the_times(tmp_path: Path) -> None:
    path = made(tmp_path / "s.bin")
    content = bytearray(path.read_bytes())
    content[70] ^= 1  # the commit record
    path.write_bytes(content)
    with DataStream.open(path, read_only=True) as stream:
        before = stream.time_marks(0, 99)
    assert len(before.marks) == 4
    repair(path)
    with DataStream.open(path, read_only=True) as stream:
        assert stream.time_marks(0, 99) == before


def test_a_reader_beside_the_writer(world: World) -> None:
    world.commit((1, b"one"))
    world.summaries.flush()
    with DataStream.open(world.path, follow=True) as reader:
        assert reader.time_of(0) == BEGIN
        world.clock.now += 5000
        world.commit((1, b"two"))
        reader.refresh()
        assert reader.time_of(1) is None  # on its way
        assert reader.entry_at(BEGIN + 1000) == 1
        world.summaries.flush()
        assert reader.time_of(1) == BEGIN + 5000
        assert reader.entry_at(BEGIN + 5000) == 1
        assert reader.entry_at(BEGIN + 6000) == 2
        world.truncate(1)
        reader.refresh()
        assert reader.entry_at(BEGIN + 5000) == 1 == reader.total_entries
        world.clock.now += 5000
        world.commit((1, b"new"))
        reader.refresh()
        world.summaries.flush()
        assert reader.time_of(1) == BEGIN + 10_000


def test_a_commit_that_waits_for_the_disk(world: World) -> None:
    """It is noted when it is made; readers do not get a number that they do not see yet."""
    world.stream.sync_policy = "commit"
    with world.stream.atomic_op() as op:
        op.add_entry(1, b"one")
        pending = op.commit(wait=False)
    seen = world.stream.total_entries
    found = world.stream.entry_at(BEGIN + 10_000)
    assert seen <= found <= world.stream.total_entries
    pending.wait()
    assert world.stream.time_of(0) == BEGIN


def test_without_checksums_nothing_is_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SumsKeeper, "get_many", lambda self, first, stop: [None] * (stop - first))
    path = made(tmp_path / "s.bin")
    assert [page and page.flags for page in records(path)] == [0, 0, 0, 0]
    with DataStream.open(path, read_only=True) as stream:
        assert stream.time_of(4) is not None


def test_what_it_reads_is_compared_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A page that it reads from the disk is in memory then, and a server does not take it for the
    one that it has compared."""
    with DataStream.open(made(tmp_path / "s.bin"), index="memory") as stream:
        pages = stream.parts.pages.for_server()
        assert pages.verify(1)
        assert pages.is_whole(1)
        monkeypatch.setattr(pages, "resident", lambda start, count: False)
        assert stream._ensure_writable().owned.summaries.marks_of(1).marks
        assert pages.is_due(1)
