"""Reading: where entries are, runs of any size, spans, what it costs, and from many threads."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from datastreamer import DataStream
from datastreamer.errors import DamagedEntry, NotFound, UnknownEntry
from datastreamer.storage.header.records import Head
from datastreamer.storage.read import page_directory as module
from datastreamer.storage.read.reader import Reader
from datastreamer.storage.read.spans import Cursor
from tests.storage.counted import HISTORY, Counted, open_reader
from tests.storage.made import (
    BOOKMARK,
    FIRST,
    PAGE,
    Item,
    Scanned,
    add,
    header_of,
    items,
    make,
    scan_file,
)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp("reader") / "s.bin", *HISTORY, index="memory")


@pytest.fixture(scope="module")
def scanned(path: Path) -> list[Scanned]:
    return scan_file(path)


@pytest.fixture
def opened(path: Path) -> Iterator[tuple[Counted, Reader]]:
    file, reader = open_reader(path)
    yield file, reader
    file.close()


@pytest.fixture
def file(opened: tuple[Counted, Reader]) -> Counted:
    return opened[0]


@pytest.fixture
def reader(opened: tuple[Counted, Reader]) -> Reader:
    return opened[1]


def test_the_history_has_the_pages_it_is_to_have(path: Path, scanned: list[Scanned]) -> None:
    starts = [e.number for e in scanned if (e.offset - FIRST) % PAGE == 0]
    assert starts == [0, 2, 202, 203, 205, 206, 207]
    assert header_of(path)[-2] == FIRST + 6 * PAGE + 17 + 18 + 18 + 21


@pytest.mark.parametrize("order", ["up", "down", "mixed"])
def test_point_reads(reader: Reader, scanned: list[Scanned], order: str, path: Path) -> None:
    numbers = {
        "up": [e.number for e in scanned],
        "down": [e.number for e in scanned][::-1],
        "mixed": [e.number * 89 % len(scanned) for e in scanned],
    }[order]
    content = path.read_bytes()
    for number in numbers:
        want = scanned[number]
        entry = reader.entry(number)
        assert (entry.number, entry.type, entry.data) == want[:3]
        packed = content[want.offset : want.offset + 17 + len(want.data)]
        assert reader.packed(number) == packed
        asked = {"prefix": b"ok", "packet_type": 0xFE}
        assert reader.packed(number, **asked) == b"ok\xfe" + packed[1:]
        assert reader.cursor(number) == (want.offset, number)


@pytest.mark.parametrize("number", [-1, 211, 2**64, -(2**70)])
def test_there_is_no_such_entry(reader: Reader, scanned: list[Scanned], number: int) -> None:
    assert len(scanned) == 211
    for ask in (reader.entry, reader.packed):
        with pytest.raises(UnknownEntry, match=f"no entry {number}: the stream holds 0 to 210"):
            ask(number)
    for start in (-1, 212):
        with pytest.raises(UnknownEntry):
            list(reader.batches(start))
    with pytest.raises(UnknownEntry):
        reader.cursor(212)
    assert reader.cursor(211) == reader.head
    with pytest.raises(DamagedEntry, match="entry 212 is due, and there are 211"):
        reader.run(Cursor(FIRST, 212))


def test_an_empty_stream(tmp_path: Path) -> None:
    file, reader = open_reader(make(tmp_path / "e.bin", index="memory"))
    assert reader.cursor(0) == (FIRST, 0)
    assert list(reader.batches(0)) == []
    span = reader.span(reader.cursor(0))
    assert span == (FIRST, FIRST, (FIRST, 0))
    batch, place = reader.run(reader.cursor(0))
    assert (len(batch), place) == (0, (FIRST, 0))
    with pytest.raises(UnknownEntry, match="no entry 0: the stream holds none"):
        reader.entry(0)
    file.close()


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 211), st.integers(0, 220), st.integers(1, 40_000) | st.just(PAGE))
def test_runs(path: Path, scanned: list[Scanned], start: int, stop: int, max_bytes: int) -> None:
    file, reader = open_reader(path)
    runs = list(reader.batches(start, stop, max_bytes))
    found = [(e.number, e.type, e.data) for run in runs for e in run]
    assert found == [e[:3] for e in scanned[start : max(start, stop)]]
    for run in runs:
        assert run.end - run.start <= max(max_bytes, 17 + len(run[0].data))
    file.close()


def test_every_cursor_continues_to_the_end(reader: Reader, scanned: list[Scanned]) -> None:
    """From each entry; from before the padding, where a run leaves it, too."""
    for entry in scanned:
        cursors = [Cursor(entry.offset, entry.number)]
        if entry.number:
            last = scanned[entry.number - 1]
            cursors.append(Cursor(last.offset + 17 + len(last.data), entry.number))
        for cursor in cursors:
            batch, place = reader.run(cursor)
            assert batch[0].number == entry.number
            assert bytes(batch.data(0)) == entry.data
            assert place.number == batch.next_number
            span = reader.span(cursor)
            assert span.start == entry.offset
            chunk = reader.chunk(cursor, 5000)
            assert chunk.start == entry.offset
            assert bytes(chunk.data) == chunk.batch.packed()


def test_spans_hold_whole_entries_of_one_page(
    reader: Reader, scanned: list[Scanned], path: Path
) -> None:
    content, cursor, found = path.read_bytes(), Cursor(FIRST, 0), b""
    spans = []
    while (span := reader.span(cursor)).end > span.start:
        spans.append(span)
        found += content[span.start : span.end]
        cursor = span.next
    assert cursor == reader.head
    assert len(spans) == 7
    assert found == b"".join(content[e.offset : e.offset + 17 + len(e.data)] for e in scanned)
    assert reader.span(cursor) == (cursor.offset, cursor.offset, cursor)


def test_a_span_costs_a_look_when_its_page_is_known(reader: Reader, file: Counted) -> None:
    cursor = Cursor(FIRST + PAGE, 2)
    reader.span(cursor)
    before = file.bytes_read
    reader.span(cursor)
    assert file.bytes_read - before == 17


def test_the_boundary_of_a_span(reader: Reader, scanned: list[Scanned]) -> None:
    span = reader.span(Cursor(FIRST + PAGE, 2))
    for entry in scanned[2:202]:
        for offset in (entry.offset - 5, entry.offset):
            if offset >= span.start:
                assert reader.boundary(span, 2, offset) == (entry.offset, entry.number)
    assert reader.boundary(span, 2, span.end) == span.next


def test_the_boundary_of_a_chunk(reader: Reader, scanned: list[Scanned]) -> None:
    chunk = reader.chunk(Cursor(FIRST + PAGE, 2), PAGE)
    ends = {e.offset: e.number for e in scanned[2:202]}
    for offset in range(chunk.start, chunk.start + len(chunk.data)):
        place = chunk.boundary(offset)
        assert ends[place.offset] == place.number
        assert place.offset <= offset
        assert not any(place.offset < end <= offset for end in ends)
    assert chunk.boundary(chunk.start + len(chunk.data)) == chunk.next


def test_first_event(reader: Reader, scanned: list[Scanned]) -> None:
    for number, want in [(0, 0), (2, 3), (3, 3), (201, 201), (208, 210), (209, 210)]:
        found = reader.first_event(number)
        assert found is not None
        assert (found.number, found.data) == (want, scanned[want].data)
    reader.head = Head(scanned[210].offset, 210)
    assert reader.first_event(208) is None


def test_first_event_behind_many_bookmarks(tmp_path: Path) -> None:
    many: list[Item] = [(BOOKMARK, n.to_bytes(3, "big")) for n in range(60_000)]
    file, reader = open_reader(make(tmp_path / "m.bin", many, [(1, b"event")], index="memory"))
    found = reader.first_event(0)
    assert found is not None
    assert (found.number, found.data) == (60_000, b"event")
    assert file.bytes_read < 3 * PAGE * 3
    file.close()


# What reading costs.


@pytest.fixture(scope="module")
def tall(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """130 pages of one entry each."""
    path = tmp_path_factory.mktemp("tall") / "s.bin"
    with DataStream.create(path, sync="os", index="memory") as stream, stream.atomic_op() as op:
        for number in range(130):
            op.add_entry(number, b"x" * 600_000)
    return path


def test_locating_takes_few_reads(tall: Path) -> None:
    for number in range(130):
        file, reader = open_reader(tall)
        assert reader.entry(number).type == number
        # 8 page starts for 130 pages, the page in 5 steps at most, the entry.
        assert file.reads <= 1 + 8 + 5 + 1
        before = file.reads
        assert reader.entry(number).type == number
        assert file.reads - before == 1
        file.close()


def test_a_page_is_read_as_far_as_it_takes(tmp_path: Path) -> None:
    path = make(tmp_path / "s.bin", [(1, bytes(983))] * 1000, index="memory")
    file, reader = open_reader(path)
    reader.entry(0)
    assert file.bytes_read < 80_000
    reader.entry(60)
    assert file.bytes_read < 100_000
    reader.entry(900)
    assert file.bytes_read < 2 * PAGE
    before = file.bytes_read
    for number in range(0, 900, 7):
        assert len(reader.entry(number).data) == 983
    assert file.bytes_read - before < 130 * 2 * 8192
    file.close()


def test_a_page_is_tabulated_once(path: Path, scanned: list[Scanned]) -> None:
    file, reader = open_reader(path)
    reader.entry(100)
    before = file.bytes_read
    for number in range(3, 202):
        reader.entry(number)
    # No more than 32 entries or 8 KiB each, that is the promise of a point read.
    assert file.bytes_read - before <= 199 * (8192 + 17 + 199)
    file.close()


def test_memory_is_bounded(tall: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_TABLES", 4)
    monkeypatch.setattr(module, "_KNOWN_PAGES", 8)
    file, reader = open_reader(tall)
    cursor = Cursor(FIRST, 0)
    for number in [*range(130), *range(129, -1, -1), *range(0, 130, 17)]:
        assert reader.entry(number).type == number
        cursor = reader.span(Cursor(FIRST + number * PAGE, number)).next
        assert len(reader.state.pages.directory[1]) <= 4
        assert len(reader.state.pages._first_numbers) <= 8
        assert len(reader.state.pages._ends) <= 8
    assert cursor.number > 0
    file.close()


# While the stream goes back and on.


def test_a_stream_truncated_during_an_iteration(tmp_path: Path) -> None:
    with DataStream.create(tmp_path / "s.bin", index="memory") as stream:
        add(stream, *[[(n, b"x" * 500_000)] for n in range(12)])
        for left in (2, 4, 5):
            iteration = stream.batches(0)
            seen = [e.number for _ in range(2) for e in next(iteration)]
            assert seen == [0, 1, 2, 3]
            stream.truncate(left)
            with pytest.raises(
                NotFound, match=r"entry [245] was removed by a truncation during the read$"
            ):
                list(iteration)
            add(stream, *[[(n, b"x" * 500_000)] for n in range(left, 12)])


def test_what_is_known_of_pages_is_forgotten(tmp_path: Path) -> None:
    """The pages begin with other entries after a truncation and other appends."""
    with DataStream.create(tmp_path / "s.bin", index="memory") as stream:
        add(stream, *[[(n, bytes([n]) * 400_000)] for n in range(20)])
        assert [stream.entry(n).type for n in range(20)] == [*range(20)]
        assert stream.reader.first_number(3) == 6
        stream.truncate(3)
        add(stream, *[[(100 + n, bytes([n]) * 900_000)] for n in range(17)])
        assert stream.reader.first_number(3) == 4
        assert [stream.entry(n).type for n in range(20)] == [0, 1, 2, *range(100, 117)]
        assert [kind for kind, _ in items(stream)] == [0, 1, 2, *range(100, 117)]


def test_readers_in_threads_beside_a_writer(tmp_path: Path) -> None:
    """Each sees a prefix of the stream, whole operations only."""
    rounds, failures = 300, list[str]()
    path = tmp_path / "s.bin"
    done = threading.Event()

    def data(number: int) -> bytes:
        return number.to_bytes(8, "big") * (number * 37 % 500)

    def read(stream: DataStream) -> None:
        at = 0
        while not failures:
            last = done.is_set()
            stream.refresh()
            total = stream.total_entries
            if total % 3:
                failures.append(f"a part of an operation: {total}")
            for entry in stream.entries(at, total):
                if (entry.number, entry.data) != (at, data(at)):
                    failures.append(f"entry {entry.number} at {at}")
                at += 1
            for number in {0, at // 2, at - 1} - {-1}:
                if at and stream.entry(number).data != data(number):
                    failures.append(f"entry by number {number}")
            if last and at == rounds * 3:
                return

    with (
        DataStream.create(path, sync="os", index="memory") as stream,
        DataStream.open(path, follow=True) as follower,
    ):
        threads = [
            threading.Thread(target=read, args=(source,)) for source in (stream, stream, follower)
        ]
        for thread in threads:
            thread.start()
        for at in range(rounds):
            add(stream, [(1, data(3 * at + n)) for n in range(3)])
        done.set()
        for thread in threads:
            thread.join(60)
        assert failures == []
        assert not any(thread.is_alive() for thread in threads)


def test_point_reads_in_threads_while_the_stream_is_truncated(tmp_path: Path) -> None:
    """An entry is of the history that was committed, or unknown; never damage, never a mix."""
    failures: list[str] = []
    with DataStream.create(tmp_path / "s.bin", sync="os", index="memory") as stream:
        add(stream, [(1, b"first")])
        done = threading.Event()

        def read() -> None:
            at = 0
            while not done.is_set():
                at = at * 31 % 97 + 1
                try:
                    entry = stream.entry(at)
                    if entry.data != bytes([entry.type]) * len(entry.data):
                        failures.append(repr(entry))
                    failures.extend(
                        repr(entry)
                        for entry in stream.entries(at)
                        if entry.data != bytes([entry.type]) * len(entry.data)
                    )
                except NotFound:
                    pass
                except DamagedEntry as error:
                    failures.append(str(error))

        threads = [threading.Thread(target=read) for _ in range(2)]
        for thread in threads:
            thread.start()
        for kind in range(1, 30):
            add(stream, [(kind, bytes([kind]) * (kind * 997 % 90_000)) for _ in range(100)])
            stream.truncate(1)
        done.set()
        for thread in threads:
            thread.join()
    assert failures == []
