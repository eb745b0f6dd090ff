"""One file, two writers: each opens the file that the other wrote, and appends to it."""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from pathlib import Path

import pytest

from datastreamer import DataStream
from datastreamer.errors import UnknownBookmark
from datastreamer.storage.header.records import PublisherRecord
from datastreamer.storage.maintain.repair import repair
from tests.interop.peer import GoPeer, beside_reference
from tests.interop.plain import PAGE, Plain, Step, digest, generated, header, keys, scan

pytestmark = beside_reference


def write_ours(stream: DataStream, steps: Iterable[Step]) -> None:
    calls = {
        "start_op": stream.start_atomic_op,
        "bookmark": stream.add_bookmark,
        "entry": stream.add_entry,
        "commit": stream.commit_atomic_op,
        "rollback": stream.rollback_atomic_op,
    }
    for name, *parameters in steps:
        calls[name](*parameters)


def write_theirs(server: GoPeer, steps: Iterable[Step]) -> None:
    calls = {
        "start_op": server.start_op,
        "bookmark": server.add_bookmark,
        "entry": server.add_entry,
        "commit": server.commit,
        "rollback": server.rollback,
    }
    for name, *parameters in steps:
        calls[name](*parameters)


def check_ours(path: Path, entries: list[Plain]) -> None:
    """Our reading of the file: header, every entry, every bookmark, nothing else."""
    with DataStream.open(path) as stream:
        assert stream.header._asdict() == header(path)
        found = [(e.number, e.type, e.data) for e in stream.entries()]
        assert found == [entry[1:] for entry in entries]
        for key, number in keys(entries).items():
            assert stream.bookmark(key) == number


def check_theirs(path: Path, entries: list[Plain]) -> None:
    """The reference's reading of the file: header, and every entry over its wire."""
    with GoPeer.serve(path) as server:
        seen = server.get_header()
        assert seen == {k: header(path)[k] for k in seen}
        assert not server.warnings
        if entries:
            read = GoPeer.read(server.address)
            assert (read["entries"], read["sha256"]) == (len(entries), digest(entries))


@pytest.mark.parametrize("seed", range(4))
def test_same_operations_same_bytes(tmp_path: Path, seed: int) -> None:
    ours, theirs = tmp_path / "ours.bin", tmp_path / "theirs.bin"
    with DataStream.create(ours, version=2, system_id=7) as stream:
        write_ours(stream, generated(seed))
    with GoPeer.serve(theirs, version=2, system_id=7) as server:
        write_theirs(server, generated(seed))
    assert header(ours) == header(theirs)
    assert scan(ours) == scan(theirs)
    check_ours(theirs, scan(theirs))
    check_theirs(ours, scan(ours))


def test_writers_take_turns_on_our_file(tmp_path: Path) -> None:
    path = tmp_path / "turns.bin"
    with DataStream.create(path) as stream:
        write_ours(stream, generated(10))
    take_turns(path)


def test_writers_take_turns_on_their_file(tmp_path: Path) -> None:
    path = tmp_path / "turns.bin"
    with GoPeer.serve(path, system_id=1101) as server:
        write_theirs(server, generated(11))
    take_turns(path)


def take_turns(path: Path) -> None:
    """Each writes in turn; the old content stays, what is new is right."""
    entries = scan(path)
    for turn in range(20, 23):
        with GoPeer.serve(path) as server:
            write_theirs(server, generated(turn, 4))
        longer = scan(path)
        assert longer[: len(entries)] == entries
        assert len(longer) > len(entries)
        check_ours(path, longer)
        with DataStream.open(path) as stream:
            write_ours(stream, generated(turn + 10, 4))
        entries = scan(path)
        assert entries[: len(longer)] == longer
        assert len(entries) > len(longer)
        check_theirs(path, entries)


def test_real_stream_continues(real_stream: Path, tmp_path: Path) -> None:
    path = tmp_path / "real.bin"
    shutil.copyfile(real_stream, path)
    before = scan(path)
    with DataStream.open(path) as stream:
        write_ours(stream, generated(30, rollbacks=False))
    entries = scan(path)
    assert entries[: len(before)] == before
    check_theirs(path, entries)


def test_takes_over_a_truncation_of_theirs(tmp_path: Path) -> None:
    path = tmp_path / "cut.bin"
    with DataStream.create(path) as stream:
        with stream.atomic_op() as op:
            op.add_bookmark(b"stays")
            op.add_entry(1, b"one")
        with stream.atomic_op() as op:
            op.add_bookmark(b"stays")
            op.add_bookmark(b"goes")
            op.add_entry(1, b"x" * (PAGE - 17))
        assert stream.bookmark(b"stays") == 2
    with GoPeer.serve(path) as server:
        server.truncate(2)
    check_ours(path, scan(path))
    with DataStream.open(path) as stream:
        assert stream.total_entries == 2
        assert stream.bookmark(b"stays") == 0
        with pytest.raises(UnknownBookmark):
            stream.bookmark(b"goes")


def test_takes_over_another_history_of_theirs(tmp_path: Path) -> None:
    # The same number of entries and bytes as before, but other bookmarks and data.
    path = tmp_path / "other.bin"
    with DataStream.create(path) as stream, stream.atomic_op() as op:
        op.add_entry(1, b"first")
        op.add_bookmark(b"old")
        op.add_entry(1, b"second")
    with DataStream.open(path) as stream:
        assert stream.bookmark(b"old") == 1
    with GoPeer.serve(path) as server:
        server.truncate(1)
        server.start_op()
        server.add_bookmark(b"new")
        server.add_entry(1, b"SECOND")
        server.commit()
    check_ours(path, scan(path))
    with DataStream.open(path) as stream:
        assert stream.entry(2).data == b"SECOND"
        with pytest.raises(UnknownBookmark):
            stream.bookmark(b"old")


def test_takes_over_an_update_of_theirs(tmp_path: Path) -> None:
    path = tmp_path / "new.bin"
    with DataStream.create(path) as stream, stream.atomic_op() as op:
        op.add_entries(4, [b"aaaa", b"bbbb", b"cccc"])
    with GoPeer.serve(path) as server:
        server.update(1, 4, b"BBBB")
    with DataStream.open(path) as stream:
        assert [entry.data for entry in stream.entries()] == [b"aaaa", b"BBBB", b"cccc"]


def test_theirs_keeps_the_source_of_a_stream(tmp_path: Path) -> None:
    path, source = tmp_path / "fenced.bin", PublisherRecord(7, b"s" * 16)
    with DataStream.create(path) as stream:
        with stream.atomic_op() as op:
            op.add_entries(4, [b"aaaa", b"bbbb", b"cccc"])
        stream.parts.writer.put_source(source)
    with GoPeer.serve(path) as server:
        server.append(3, bookmarks=True)
        server.update(1, 4, b"BBBB")
        server.truncate(2)
        server.append(3, bookmarks=True)
    for mode in ({"read_only": True}, {}):
        with DataStream.open(path, **mode) as stream:  # type: ignore[arg-type]
            assert stream.total_entries > 2
            assert stream.source == source


def test_takes_over_from_a_killed_writer(tmp_path: Path) -> None:
    path = tmp_path / "killed.bin"
    with GoPeer.serve(path) as server:
        server.start_op()
        server.add_bookmark(b"kept")
        server.add_entry(1, b"kept")
        server.commit()
        server.start_op()
        server.add_bookmark(b"lost")
        server.add_entry(1, b"lost")
        server.kill()
    with DataStream.open(path) as stream:
        assert stream.total_entries == 2
        with pytest.raises(UnknownBookmark):
            stream.bookmark(b"lost")
        with stream.atomic_op() as op:
            assert op.add_entry(1, b"next") == 2
    check_theirs(path, scan(path))


def test_theirs_takes_over_our_truncation_and_update(tmp_path: Path) -> None:
    path = tmp_path / "changed.bin"
    with GoPeer.serve(path) as server:
        server.append(40, bookmarks=True)
    before = scan(path)
    with DataStream.open(path) as stream:
        stream.truncate(100)
        stream.update_entry(99, 1, b"u" * 200)
    entries = scan(path)
    assert entries[:99] == before[:99]
    assert entries[99:] == [before[99]._replace(data=b"u" * 200)]
    check_theirs(path, entries)


def test_theirs_goes_live_behind_a_full_page(tmp_path: Path) -> None:
    # The reference never goes live where its file ends with the committed data.
    path = tmp_path / "full.bin"
    with DataStream.create(path) as stream, stream.atomic_op() as op:
        op.add_entry(1, bytes(PAGE - 17))
    assert (header(path)["total_length"] - 4096) % PAGE == 0
    assert (path.stat().st_size - 4096) % PAGE == 0
    assert path.stat().st_size > header(path)["total_length"]
    with GoPeer.serve(path) as server, GoPeer.client(server.address) as client:
        client.start(0)
        assert [e["number"] for e in client.entries(1)] == [0]
        server.append(1, 1)
        assert [e["number"] for e in client.entries(1)] == [1]


@pytest.mark.parametrize("broken", ["an entry", "a page", "the totals", "the size"])
def test_a_repaired_file(tmp_path: Path, broken: str) -> None:
    """The reference wrote the file, it was damaged, and both append to what repair kept."""
    path = tmp_path / "stream.bin"
    with GoPeer.serve(path) as server:
        write_theirs(server, generated(40))
    entries = scan(path)
    content = bytearray(path.read_bytes())
    if broken == "an entry":
        content[entries[len(entries) // 2].offset] = 9
    elif broken == "a page":
        content[4096 + PAGE : 4096 + 2 * PAGE] = bytes(PAGE)
    elif broken == "the totals":
        content[46:54] = bytes(8)
    else:
        content += b"\1"
    path.write_bytes(content)
    done = repair(path, cut=True)
    assert done.report.ok
    left = scan(path)
    assert left == entries[: len(left)]
    assert (len(left) < len(entries)) == (broken in ("an entry", "a page"))
    check_theirs(path, left)
    check_ours(path, left)
