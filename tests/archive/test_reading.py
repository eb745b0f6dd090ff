"""An archive is read as the stream file that it was made of, also while it grows."""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from datastreamer.archive.peer import ArchivePeer
from datastreamer.archive.reading import Archive
from datastreamer.errors import (
    ArchiveChanged,
    ArchiveMissing,
    ArchiveUnreachable,
    DamagedArchive,
    StreamClosed,
    StreamReadOnly,
    UnknownBookmark,
    UnknownEntry,
    WrongStreamType,
)
from datastreamer.format import TYPE_BOOKMARK
from datastreamer.storage.objects import page_runs
from datastreamer.storage.stream import DataStream
from tests.archive.stores import MemoryStore, ensure_whole, fill, opened, push
from tests.storage.summaries.worlds import World


def archive_of(memory: MemoryStore, interval: float = 0.0) -> Archive:
    return Archive(opened(memory), interval=interval)


@pytest.fixture
def memory() -> MemoryStore:
    return MemoryStore()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "s.bin"


def test_every_entry_and_bookmark(path: Path, memory: MemoryStore) -> None:
    with DataStream.create(path, version=3, system_id=7) as stream:
        fill(stream, 11.3)
        push(path, memory, pages=5)
        fill(stream, 9.2, seed=1)
        push(path, memory, pages=5)
        with archive_of(memory) as archive:
            assert archive.header() == stream.header
            assert archive.manifest.number == 2
            with archive.stream() as other:
                assert (other.stream_id, other.epoch) == (stream.stream_id, stream.epoch)
                assert len(other.bookmarks) == len(stream.bookmarks)
            packed = b"".join(batch.packed() for batch in archive.batches())
            assert packed == b"".join(batch.packed() for batch in stream.batches())
            numbers = list(range(stream.total_entries))
            random.Random(1).shuffle(numbers)
            for number in numbers:
                entry = stream.entry(number)
                assert archive.entry(number) == entry
                if entry.type == TYPE_BOOKMARK:
                    assert archive.bookmark(entry.data) == stream.bookmark(entry.data)
            some = [e for batch in archive.batches(101, 250) for e in batch]
            assert some == list(stream.entries(101, 250))
            with pytest.raises(UnknownEntry):
                archive.entry(stream.total_entries)
            with pytest.raises(UnknownBookmark):
                archive.bookmark(b"no such key")
    with pytest.raises(WrongStreamType):
        Archive(opened(memory), stream_type=2)


@pytest.mark.parametrize("size", [None, (1 << 20) - 17, (1 << 20) - 18, 100])
def test_ends_at_the_edge_of_a_page(path: Path, memory: MemoryStore, size: int | None) -> None:
    """No entry; an exactly full page; one with a byte of padding, and the next page with one."""
    with DataStream.create(path) as stream:
        if size is not None:
            stream.append(2, bytes(size))
            stream.append(2, b"x" * 50)
        push(path, memory)
        with archive_of(memory) as archive:
            assert [e for batch in archive.batches() for e in batch] == list(stream.entries())
        if size is not None:
            stream.truncate(1)
            push(path, memory)
            with archive_of(memory) as archive:
                assert archive.header() == stream.header
                assert [e for batch in archive.batches() for e in batch] == list(stream.entries())
                assert archive.entry(0).data == bytes(size)


def test_what_an_open_and_a_look_up_read(path: Path, memory: MemoryStore) -> None:
    with DataStream.create(path) as stream:
        fill(stream, 40.5)
        stream.append(2, b"last")
        with stream.atomic_op() as op:
            op.add_bookmark(b"newest")
            op.add_entry(2, b"event")
    push(path, memory, pages=8)

    def asked(look: Callable[[Archive], object]) -> list[str]:
        with archive_of(memory) as archive:
            opening = [name for operation, name in memory.operations[-3:]]
            assert opening[0] == "stream.json"
            assert opening[1:] == ["m/", "m/0000000000000001.json.zst"]
            memory.operations.clear()
            look(archive)
            return [name[:20] for operation, name in memory.operations]

    rows = opened(memory).newest()[0].rows
    assert asked(lambda archive: None) == []
    for row in (rows[0], rows[2], rows[-1]):
        # The footer and the pages.
        name = row.object[:20]
        assert asked(lambda archive, row=row: archive.entry(row.first_entry)) == [name, name]  # type: ignore[misc]
    assert asked(lambda archive: archive.bookmark(b"newest")) == [rows[-1].object[:20]]
    # A scan asks once for each run and each footer.
    ranges = asked(lambda archive: [len(batch) for batch in archive.batches()])
    assert len(ranges) == sum(-(-row.pages // page_runs._RUN) for row in rows) + len(rows)


def test_memory_is_bounded(path: Path, memory: MemoryStore) -> None:
    with DataStream.create(path) as stream:
        fill(stream, 60)
    push(path, memory, pages=16)
    with archive_of(memory) as archive, archive.stream() as stream:
        runs = stream._file.file._shown[0]._runs  # type: ignore[attr-defined]
        assert max(len(runs) for _ in stream.batches()) == page_runs._MOST_RUNS


def test_follows_what_is_archived_later(path: Path, memory: MemoryStore) -> None:
    with DataStream.create(path) as stream:
        fill(stream, 0.3)
        push(path, memory)
        with archive_of(memory) as archive:
            found = archive.batches(follow=True)
            number = 0
            for pages in (0, 0.4, 2.2, 0.1, 9):
                fill(stream, pages, seed=number)
                push(path, memory)
                while number < stream.total_entries:
                    batch = next(found)
                    assert batch.first_number == number
                    assert batch.packed() == b"".join(
                        b"\2" + (17 + len(e.data)).to_bytes(4, "big") + e.type.to_bytes(4, "big")
                        + e.number.to_bytes(8, "big") + e.data
                        for e in stream.entries(number, batch.next_number)
                    )  # fmt: skip
                    number = batch.next_number
            assert archive.header().total_entries < number
            with archive.stream(follow=True) as follower:
                follower.refresh()
                assert follower.manifest.number > 1
                with stream.atomic_op() as op:
                    op.add_bookmark(b"fresh")
                    op.add_entry(2, b"event")
                push(path, memory)
                assert follower.first_event_after_bookmark(b"fresh").data == b"event"
            # Truncated before it was archived: no archived entry changes.
            fill(stream, 0.1)
            stream.truncate(stream.total_entries - 1)
            push(path, memory)
            assert next(found).first_number == number
            stream.truncate(number - 1)
            push(path, memory)
            with pytest.raises(ArchiveChanged, match=r"updated \(truncation at entry .* 1, which"):
                next(found)
        ensure_whole(memory, path)


def test_a_newer_manifest_is_not_looked_for_too_often(path: Path, memory: MemoryStore) -> None:
    with DataStream.create(path) as stream:
        fill(stream, 3)
        push(path, memory)
        with archive_of(memory, interval=3600) as archive, archive.stream(follow=True) as follower:
            memory.operations.clear()
            fill(stream, 1)
            push(path, memory)
            looks = len([name for _, name in memory.operations if name == "m/"])
            for _ in range(100):
                assert not follower.refresh()
            assert len([name for _, name in memory.operations if name == "m/"]) == looks


def test_times(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, memory: MemoryStore) -> None:
    """No entry that was committed at a time or later is before the place to begin."""
    world = World(tmp_path, monkeypatch)
    chosen = random.Random(3)
    for _ in range(40):
        for _ in range(chosen.randrange(1, 4)):
            world.commit((2, bytes(chosen.randrange(200_000))))
        world.clock.now += chosen.choice([1, 300, 999, 1000, 5000, 10**6])
        if chosen.random() < 0.2:
            world.work()
    world.work()
    times = world.times
    push(world.path, memory, pages=3)
    with archive_of(memory) as archive:
        starts = {row.first_entry for row in archive.manifest.rows}
        for at in sorted({0, *times, *(ms + d for ms in times for d in (-1, 1, 998, 1001))}):
            first = next((n for n, ms in enumerate(times) if ms >= at), len(times))
            found = archive.at_time(at)
            assert found <= first, at
            starts.add(found)
        # Pages without entries of that time are left out.
        assert len(starts) > 6
        assert archive.at_time(times[-1] + 10**9) in (
            archive.manifest.rows[-1].first_entry,
            len(times),
        )
    world.truncate(len(times) // 2)
    for _ in range(30):
        world.commit((2, bytes(100_000)))
        world.clock.now += 700
    push(world.path, memory, pages=3)
    with archive_of(memory) as archive:
        for at in sorted({*world.times, *(ms + 1 for ms in world.times)}):
            first = next((n for n, ms in enumerate(world.times) if ms >= at), len(world.times))
            assert archive.at_time(at) <= first, at
    world.close()


@pytest.mark.parametrize("fault", ["changed", "short", "404", "500"])
def test_a_damaged_object(path: Path, memory: MemoryStore, fault: str) -> None:
    with DataStream.create(path) as stream:
        fill(stream, 12)
        push(path, memory, pages=4)
        rows = opened(memory).newest()[0].rows
        bad = rows[1]
        error = ArchiveUnreachable if fault in ("500", "short") else DamagedArchive
        with archive_of(memory) as archive:
            memory.fault = lambda operation, name: fault * (name == bad.object)
            batches = archive.batches()
            while (batch := next(batches)).next_number < bad.first_entry:
                assert batch
            numbers = [batch.next_number]
            with pytest.raises(error, match=bad.object):
                # (A changed byte is in one page of those that are fetched together.)
                numbers.extend(each.next_number for each in batches)
            number = numbers[-1]
            assert number <= rows[2].first_entry
            with pytest.raises(error, match=bad.object):
                archive.entry(number)
            after = rows[2].first_entry
            assert archive.entry(after) == stream.entry(after)
            # What could not be read is asked for again.
            memory.fault = lambda operation, name: ""
            assert archive.entry(number) == stream.entry(number)
            memory.fault = lambda operation, name: fault * (operation == "get_range")
            assert archive.entry(number) == stream.entry(number)


def test_a_missing_archive(memory: MemoryStore, path: Path) -> None:
    with pytest.raises(ArchiveMissing):
        archive_of(memory)
    DataStream.create(path).close()
    push(path, memory)
    del memory.objects["m/0000000000000001.json.zst"]
    with pytest.raises(ArchiveMissing, match="no manifest yet"):
        archive_of(memory)


def test_nothing_is_written_and_a_closed_one_is_not_read(path: Path, memory: MemoryStore) -> None:
    with DataStream.create(path) as stream:
        fill(stream, 3)
    push(path, memory)
    archive = archive_of(memory)
    with archive.stream() as stream, pytest.raises(StreamReadOnly):
        stream.append(2, b"no")
    batches = archive.batches()
    next(batches)
    archive.close()
    archive.close()
    assert next(batches).first_number
    with pytest.raises(StreamClosed):
        archive.entry(0)


def test_verify_and_restore(path: Path, memory: MemoryStore, tmp_path: Path) -> None:
    with DataStream.create(path) as stream:
        fill(stream, 3)
    push(path, memory)
    with archive_of(memory) as archive:
        assert archive.verify().problems == []
        header = archive.restore(tmp_path / "r.bin", to_entry=20)
        assert header.total_entries == 20
        assert header == archive.header()._replace(total_entries=20, total_length=header[3])


def test_as_a_peer(path: Path, memory: MemoryStore, monkeypatch: pytest.MonkeyPatch) -> None:
    with DataStream.create(path) as stream:
        fill(stream, 9.5)
        push(path, memory)
        monkeypatch.setattr(
            "datastreamer.archive.peer.OpenArchive.open", lambda url: opened(memory)
        )
        with ArchivePeer("archive:s3://bucket/stream") as peer:
            assert peer.name == "archive:s3://bucket/stream"
            assert (peer.header(), peer.stream_id()) == (stream.header, stream.stream_id)
            theirs = stream.parts.pages.sums(0, 100)[0]
            assert len(theirs) >= 9
            for pages in (0, 1, 5, 9, 100):
                assert peer.page_sums(pages) == theirs[:pages]
            packed = b"".join(batch.packed() for batch in stream.batches(10, 90))
            assert peer.entries(10, 90, len(packed)) == packed
            with pytest.raises(Exception, match="entries 10 to 89 have more than"):
                peer.entries(10, 90, len(packed) - 1)
            fill(stream, 1)
            push(path, memory)
            assert peer.header() != stream.header
            peer.close()
            assert peer.header() == stream.header


def test_without_the_extra(tmp_path: Path) -> None:
    """One line with the way to install it; the rest of the package works."""
    program = (
        "import sys; sys.modules['obstore'] = None\n"
        "from datastreamer.cli.main import main\n"
        "sys.exit(main(sys.argv[1:]))"
    )
    DataStream.create(tmp_path / "s.bin").close()
    for words, code in ((("archive:file:///x",), 1), ((str(tmp_path / "s.bin"),), 0)):
        done = subprocess.run(
            [sys.executable, "-c", program, "cat", *words],
            check=False, capture_output=True, text=True,
        )  # fmt: skip
        assert done.returncode == code, done
        assert len(done.stderr.splitlines()) == code
        assert not code or "archive" in done.stderr
