"""The stream: operations, reading, bookmarks, wake-ups."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from datastreamer import DataStream, Entry
from datastreamer.errors import (
    BadBookmark,
    BadEntryType,
    BadRange,
    EntryTooLarge,
    NoOperation,
    OperationOpen,
    StreamClosed,
    UnknownBookmark,
    UnknownEntry,
)
from datastreamer.storage import parts, view
from tests.conftest import Golden
from tests.storage.made import (
    BOOKMARK,
    FIRST,
    LARGEST,
    ONE,
    PAGE,
    TWO,
    add,
    header_of,
    items,
    make,
    scan_file,
)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "s.bin"


# Operations.


def test_an_operation_is_seen_as_a_whole(path: Path) -> None:
    with DataStream.create(path) as stream:
        with stream.atomic_op() as op:
            assert op.add_bookmark(b"k") == 0
            assert op.add_entry(1, b"one") == 1
            assert op.add_entry(2, bytearray(b"two")) == 2
            assert op.add_entry(3, memoryview(b"-three-")[1:-1]) == 3
            assert op.add_entries(4, [b"four", b""]) == range(4, 6)
            assert op.add_entries([5, 6], (b"five", b"six")) == range(6, 8)
            assert stream.total_entries == 0
            assert list(stream.entries()) == []
            with pytest.raises(UnknownEntry):
                stream.entry(0)
            with pytest.raises(UnknownBookmark):
                stream.bookmark(b"k")
            assert header_of(path)[-2:] == (FIRST, 0)
        assert stream.total_entries == 8
        assert items(stream) == [
            *[(BOOKMARK, b"k"), (1, b"one"), (2, b"two"), (3, b"three"), (4, b"four"), (4, b"")],
            *[(5, b"five"), (6, b"six")],
        ]
        assert header_of(path)[-1] == 8


def test_the_same_without_a_block(path: Path) -> None:
    with DataStream.create(path) as stream:
        stream.start_atomic_op()
        assert stream.add_bookmark(b"k") == 0
        assert stream.add_entry(1, b"one") == 1
        assert stream.add_entries(2, iter([b"two", b"three"])) == range(2, 4)
        assert stream.total_entries == 0
        stream.commit_atomic_op()
        stream.start_atomic_op()
        assert stream.add_entry(9, b"never") == 4
        stream.rollback_atomic_op()
        stream.start_atomic_op()
        assert stream.add_entry(4, b"four") == 4
        stream.commit_atomic_op()
        assert [data for _, data in items(stream)] == [b"k", b"one", b"two", b"three", b"four"]


def fail_in(stream: DataStream) -> None:
    with stream.atomic_op() as op:
        op.add_entry(1, b"never")
        raise ZeroDivisionError


def test_an_exception_rolls_back(path: Path) -> None:
    with DataStream.create(path) as stream:
        with pytest.raises(ZeroDivisionError):
            fail_in(stream)
        add(stream, ONE)
        assert items(stream) == ONE


def test_ended_by_hand_inside_the_block(path: Path) -> None:
    with DataStream.create(path) as stream:
        with stream.atomic_op() as op:
            op.add_entry(1, b"never")
            stream.rollback_atomic_op()
        with stream.atomic_op() as op:
            op.add_entry(1, b"early")
            stream.commit_atomic_op()
            assert stream.total_entries == 1
        assert items(stream) == [(1, b"early")]


def test_an_empty_operation_changes_nothing(path: Path) -> None:
    with DataStream.create(path) as stream:
        before = path.read_bytes()
        with stream.atomic_op():
            pass
        stream.start_atomic_op()
        stream.commit_atomic_op()
        assert path.read_bytes() == before


def test_a_refused_entry_leaves_the_operation_as_it_was(path: Path) -> None:
    refused: list[tuple[type[Exception], Callable[[DataStream], object]]] = [
        (BadEntryType, lambda s: s.add_entry(BOOKMARK, b"k")),
        (BadEntryType, lambda s: s.add_entry(2**32, b"")),
        (BadEntryType, lambda s: s.add_entry(-1, b"")),
        (EntryTooLarge, lambda s: s.add_entry(1, bytes(LARGEST + 1))),
        (EntryTooLarge, lambda s: s.add_entry(1, bytes(2 * PAGE))),
        (BadBookmark, lambda s: s.add_bookmark(b"")),
        (BadBookmark, lambda s: s.add_bookmark(b"x" * 17)),
        (EntryTooLarge, lambda s: s.add_entries(1, [b"good", bytes(LARGEST + 1)])),
        (BadEntryType, lambda s: s.add_entries([1, BOOKMARK], [b"good", b"bad"])),
        (ValueError, lambda s: s.add_entries([1], [b"good", b"more"])),
        (TypeError, lambda s: s.add_entries(1, [b"good", "text"])),  # type: ignore[list-item]
        (TypeError, lambda s: s.add_entry(1, "text")),  # type: ignore[arg-type]
    ]
    with DataStream.create(path) as stream:
        stream.start_atomic_op()
        for number, (error, call) in enumerate(refused):
            with pytest.raises(error):
                call(stream)
            assert stream.add_entry(1, b"%d" % number) == number
        assert stream.add_entry(1, bytes(LARGEST)) == len(refused)
        stream.commit_atomic_op()
        assert items(stream) == [
            *((1, b"%d" % n) for n in range(len(refused))),
            (1, bytes(LARGEST)),
        ]


@pytest.mark.parametrize("kind", [0, 1, 0xAF, 0xB1, 2**32 - 1])
def test_types_at_the_edges(path: Path, kind: int) -> None:
    with DataStream.create(path, index="memory") as stream:
        add(stream, [(kind, b"x")])
        assert stream.entry(0) == Entry(0, kind, b"x")


def test_calls_in_the_wrong_state(path: Path) -> None:
    with DataStream.create(path) as stream:
        op = stream.atomic_op()
        for call in (
            lambda: stream.add_entry(1, b"x"),
            lambda: stream.add_bookmark(b"x"),
            lambda: stream.add_entries(1, [b"x"]),
            lambda: op.add_entry(1, b"x"),
            stream.commit_atomic_op,
            stream.rollback_atomic_op,
        ):
            with pytest.raises(NoOperation, match="no atomic operation is open"):
                call()
        add(stream, ONE)
        stream.start_atomic_op()
        stream.add_entry(5, b"open")
        for call in (
            stream.start_atomic_op,
            lambda: stream.atomic_op().__enter__(),
            lambda: stream.truncate(0),
            lambda: stream.update_entry(1, 1, b"two"),
        ):
            with pytest.raises(OperationOpen):
                call()
        # None of it ended the operation.
        stream.commit_atomic_op()
        assert items(stream) == [*ONE, (5, b"open")]
        for call in (stream.commit_atomic_op, stream.rollback_atomic_op):
            with pytest.raises(NoOperation):
                call()


def test_a_close_rolls_back(path: Path) -> None:
    stream = DataStream.create(path)
    add(stream, ONE)
    stream.start_atomic_op()
    stream.add_entry(1, b"never")
    with pytest.warns(ResourceWarning, match="discarded"):
        stream.close()
    assert [(e.type, e.data) for e in scan_file(path)] == ONE


def test_a_huge_operation(path: Path) -> None:
    """Larger than what is held in memory: it is placed, and seen when it is committed."""
    big = [(n, bytes([n]) * 700_000) for n in range(1, 30)]
    with DataStream.create(path, index="memory") as stream:
        add(stream, ONE)
        with stream.atomic_op() as op:
            for kind, data in big:
                op.add_entry(kind, data)
                assert len(op.arena) < 6 * PAGE
            assert stream.total_entries == 2
            assert header_of(path)[-1] == 2
            assert b"\x05" * 700_000 in path.read_bytes()
        assert items(stream) == ONE + big
        stream.start_atomic_op()
        for kind, data in big:
            stream.add_entry(kind, data[::-1])
        stream.rollback_atomic_op()
        assert items(stream) == ONE + big
        add(stream, TWO)
        assert items(stream) == ONE + big + TWO
    assert [(e.type, e.data) for e in scan_file(path)] == ONE + big + TWO


def test_entries_of_another_stream(path: Path, tmp_path: Path) -> None:
    source = make(tmp_path / "source.bin", TWO, ONE, [(7, b"x" * 200_000)] * 20)
    with DataStream.open(source, read_only=True) as other, DataStream.create(path) as stream:
        add(stream, ONE)
        with stream.atomic_op() as op:
            for batch in other.batches(1):
                op.add_batch(batch)
        assert items(stream) == ONE + items(other)[1:]
        assert stream.bookmark(b"k") == 3


def test_a_guard_keeps_a_commit_from_being_written(path: Path) -> None:
    def refuse() -> None:
        raise RuntimeError("the server has ended")

    with DataStream.create(path) as stream:
        stream.commit_guard = refuse
        with pytest.raises(RuntimeError, match="the server has ended"):
            add(stream, ONE)
        assert stream.total_entries == 0
        stream.commit_guard = None
        add(stream, ONE)
        assert items(stream) == ONE


# Reading.


def test_entries_and_batches(path: Path) -> None:
    with DataStream.create(path, index="memory") as stream:
        add(stream, [(n, bytes(n)) for n in range(100)])
        assert [e.type for e in stream.entries()] == [*range(100)]
        assert [e.type for e in stream.entries(10)] == [*range(10, 100)]
        assert [e.type for e in stream.entries(10, 20)] == [*range(10, 20)]
        assert [e.type for e in stream.entries(90, 1000)] == [*range(90, 100)]
        assert list(stream.entries(20, 10)) == []
        assert list(stream.entries(100)) == []
        sizes = [len(batch) for batch in stream.batches(0, 50, max_bytes=500)]
        assert sum(sizes) == 50
        assert len(sizes) > 2
        for start in (-1, 101):
            with pytest.raises(UnknownEntry):
                list(stream.entries(start))


def test_an_iteration_ends_where_the_laneed_when_it_began(path: Path) -> None:
    with DataStream.create(path, index="memory") as stream:
        add(stream, ONE)
        iteration = stream.entries()
        assert next(iteration).number == 0
        add(stream, TWO)
        assert [e.number for e in iteration] == [1]


# Bookmarks.


def test_first_event_after_a_bookmark(path: Path) -> None:
    with DataStream.create(path) as stream:
        add(stream, [(BOOKMARK, b"a"), (BOOKMARK, b"b"), (1, b"one"), (BOOKMARK, b"c")])
        assert stream.first_event_after_bookmark(b"a") == Entry(2, 1, b"one")
        assert stream.first_event_after_bookmark(b"b") == Entry(2, 1, b"one")
        with pytest.raises(UnknownBookmark, match="no event follows the bookmark 0x63"):
            stream.first_event_after_bookmark(b"c")
        with pytest.raises(UnknownBookmark, match="no bookmark 0x7a in the stream") as caught:
            stream.first_event_after_bookmark(b"z")
        assert caught.value.key == b"z"
        assert isinstance(caught.value, LookupError)
        stream.start_atomic_op()
        stream.add_entry(2, b"uncommitted")
        with pytest.raises(UnknownBookmark):
            stream.first_event_after_bookmark(b"c")
        stream.commit_atomic_op()
        assert stream.first_event_after_bookmark(b"c") == Entry(4, 2, b"uncommitted")


def test_data_between_bookmarks(path: Path) -> None:
    big = bytes(range(256)) * 3000
    with DataStream.create(path) as stream:
        add(
            stream,
            [(BOOKMARK, b"a"), (1, b"one"), (BOOKMARK, b"b"), (2, b""), (3, big), (3, big)],
            [(BOOKMARK, b"c"), (4, b"four"), (BOOKMARK, b"a2")],
        )
        between = stream.data_between_bookmarks
        assert between(b"a", b"b") == b"one"
        assert between(b"a", b"c") == b"one" + big + big
        assert between(b"b", b"a2") == big + big + b"four"
        assert between(b"c", b"c") == b""
        with pytest.raises(BadRange, match=r"0x61 \(entry 0\) precedes 0x62 \(entry 2\)"):
            between(b"b", b"a")
        for first, last in ((b"a", b"z"), (b"z", b"a")):
            with pytest.raises(UnknownBookmark, match="0x7a"):
                between(first, last)


# What the reference's own calls give, as recorded.


def recorded(golden: Golden, name: str) -> list[dict[str, Any]]:
    (case,) = [c for c in json.loads((golden.folder / "api.json").read_text()) if c["name"] == name]
    steps: list[dict[str, Any]] = case["steps"]
    return steps


ERRORS: dict[str, type[Exception]] = {
    "add entry not allowed, atomicop is not started": NoOperation,
    "commit not allowed, atomicop not in started state": NoOperation,
    "rollback not allowed, atomicop not in started state": NoOperation,
    "start atomicop not allowed, atomicop already started": OperationOpen,
    "truncate not allowed, atomic operation in progress": OperationOpen,
    "invalid entry number, doesn't exist": UnknownEntry,
    "leveldb: not found": UnknownBookmark,
    "invalid bookmark range": BadRange,
}


def call(stream: DataStream, step: dict[str, Any]) -> object:
    data = bytes.fromhex(step["data"]) if "data" in step else b""
    match step["op"]:
        case "start_op":
            return stream.start_atomic_op()
        case "commit":
            return stream.commit_atomic_op()
        case "rollback":
            return stream.rollback_atomic_op()
        case "entry":
            return {"number": stream.add_entry(step["type"], data)}
        case "bookmark":
            return {"number": stream.add_bookmark(data)}
        case "truncate":
            return stream.truncate(step["entry"])
        case "update":
            return stream.update_entry(step["entry"], step["type"], data)
        case "get_entry":
            return stream.entry(step["entry"])
        case "get_bookmark":
            return {"number": stream.bookmark(data)}
        case "first_event":
            return stream.first_event_after_bookmark(data)
        case "between":
            last = bytes.fromhex(step["data2"])
            return {"data_hex": stream.data_between_bookmarks(data, last).hex()}
        case "header":
            header = stream.header
            names = ("system_id", "total_entries", "total_length", "version")
            return {"header": {name: getattr(header, name) for name in names}}
        case other:
            raise AssertionError(other)


@pytest.mark.parametrize(
    "name",
    [
        "calls in the wrong state, on an empty stream",
        "bookmark queries through the API",
        "truncation",
    ],
)
def test_as_recorded(path: Path, golden: Golden, name: str) -> None:
    with DataStream.create(path, system_id=1) as stream:
        for step in recorded(golden, name):
            want, error = step["result"], None
            if isinstance(want, dict):
                error = want.get("error")
            if stream._op.is_open and step["op"] == "get_bookmark":
                # The reference finds a bookmark before it is committed; we do not.
                assert want == {"number": 4}
                error = "leveldb: not found"
            if stream._op.is_open and step["op"] == "between":
                # And then cannot read the entries: nor do we, but we say why.
                error = "leveldb: not found"
            if step["op"] == "first_event" and step["data"] == "63":
                # Only the bookmark itself is left: the reference answers with it.
                assert want["entry"]["type"] == BOOKMARK
                error = "leveldb: not found"
            if error is not None:
                with pytest.raises(ERRORS[error]):
                    call(stream, step)
                continue
            found = call(stream, step)
            assert found == (None if want == "ok" else want)


def test_an_entry_larger_than_a_page_is_refused_before_it_is_written(path: Path) -> None:
    """The reference takes it, and has a broken file."""
    with DataStream.create(path) as stream:
        before = path.read_bytes()
        stream.start_atomic_op()
        for size in (LARGEST + 1, 2 * PAGE, 10 * PAGE):
            with pytest.raises(EntryTooLarge, match="at most 1,048,559 bytes of data"):
                stream.add_entry(1, bytes(size))
        stream.commit_atomic_op()
        assert path.read_bytes() == before


# Wake-ups.


def test_wakers(path: Path) -> None:
    reading, writing = os.pipe2(os.O_NONBLOCK)
    with DataStream.create(path) as stream:
        stream.parts.writer.add_waker(writing)
        add(stream, ONE)
        assert len(os.read(reading, 100)) == 8
        add(stream, ONE, TWO)
        assert len(os.read(reading, 100)) == 16
        with stream.atomic_op():
            pass
        with pytest.raises(ZeroDivisionError):
            fail_in(stream)
        with pytest.raises(BlockingIOError):
            os.read(reading, 100)
        stream.truncate(1)
        assert len(os.read(reading, 100)) == 8
        stream.parts.writer.remove_waker(writing)
        add(stream, ONE)
        with pytest.raises(BlockingIOError):
            os.read(reading, 100)
    os.close(reading)
    os.close(writing)


# What else it says.


def test_a_view_has_a_head_of_its_own(path: Path) -> None:
    with DataStream.create(path, index="memory") as stream:
        add(stream, ONE)
        view = stream.new_reader()
        add(stream, TWO)
        assert view.head.entries == 2
        with pytest.raises(UnknownEntry):
            view.entry(2)
        view.head = stream.reader.head
        assert view.entry(3).data == b"k"


def test_what_a_stream_says_of_itself(path: Path) -> None:
    with DataStream.create(path, index="memory") as stream:
        add(stream, ONE)
        assert stream.path == str(path)
        assert stream.index_name == "memory"
        assert os.pread(stream.fileno(), 16, 0) == b"polygonDATSTREAM"
        assert stream.file_size == path.stat().st_size


@pytest.mark.parametrize("size", [0, -1])
def test_runs_of_no_bytes(tmp_path: Path, size: int) -> None:
    with DataStream.create(tmp_path / "s.bin", index="memory") as stream:
        add(stream, [(1, b"one")])
        with pytest.raises(ValueError, match=f"max_bytes is at least 1, not {size}"):
            stream.batches(max_bytes=size)


def test_a_closed_stream_says_so(tmp_path: Path) -> None:
    path = make(tmp_path / "s.bin", [(BOOKMARK, b"k")])
    for read_only in (False, True):
        stream = DataStream.open(path, read_only=read_only)
        bookmarks = stream.bookmarks
        stream.close()
        asked: list[Callable[[], object]] = [
            lambda stream=stream: stream.file_size,  # type: ignore[misc]
            lambda bookmarks=bookmarks: len(bookmarks),  # type: ignore[misc]
        ]
        for ask in asked:
            with pytest.raises(StreamClosed, match="the stream is closed"):
                ask()
    never_asked = DataStream.open(path, read_only=True)
    never_asked.close()
    with pytest.raises(StreamClosed, match="the stream is closed"):
        _ = never_asked.bookmarks


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
def test_any_bytes_are_a_key(tmp_path: Path, kind: Callable[[bytes], Any]) -> None:
    path = make(tmp_path / "s.bin", [(BOOKMARK, b"a"), (1, b"one"), (BOOKMARK, b"b")])
    for read_only in (False, True):
        with DataStream.open(path, read_only=read_only) as stream:
            a, b, c = (kind(key) for key in (b"a", b"b", b"c"))
            assert (stream.bookmark(a), stream.bookmark(b)) == (0, 2)
            assert stream.first_event_after_bookmark(a).number == 1
            assert stream.data_between_bookmarks(a, b) == b"one"
            for ask in (stream.bookmark, stream.first_event_after_bookmark):
                with pytest.raises(UnknownBookmark, match="0x63"):
                    ask(c)
            with pytest.raises(UnknownBookmark, match="no event follows the bookmark 0x62"):
                stream.first_event_after_bookmark(b)
            with pytest.raises(BadRange, match="0x61"):
                stream.data_between_bookmarks(b, a)


@pytest.mark.parametrize("name", ["version", "system_id", "stream_type"])
@pytest.mark.parametrize("value", [1.5, "1", None])
def test_a_header_of_no_numbers(tmp_path: Path, name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"{name.replace('_', ' ')} is a .*, not {value!r}"):
        DataStream.create(tmp_path / "s.bin", **{name: value})
    assert not list(tmp_path.iterdir())


def test_threads_that_ask_first_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two indexes that a reader opens, one would never be closed."""
    path = make(tmp_path / "s.bin", [(BOOKMARK, b"k")])
    made, second = [], threading.Event()
    real = view.BookmarkKeeper

    def keeper(*args: Any, **options: Any) -> view.BookmarkKeeper:
        made.append(1)
        if len(made) == 1:
            other.start()
            second.wait(0.1)
        else:
            second.set()
        return real(*args, **options)

    monkeypatch.setattr(view, "BookmarkKeeper", keeper)
    with DataStream.open(path, read_only=True) as stream:
        other = threading.Thread(target=stream.bookmark, args=[b"k"])
        assert stream.bookmark(b"k") == 0
        other.join()
    assert made == [1]


def test_what_our_own_parts_use_is_not_public() -> None:
    kinds = (parts.StreamFeed, parts.StreamPages, parts.WriterPart, parts.RelayPart, parts.Counters)
    inside = {name for kind in kinds for name in dir(kind) if not name.startswith("_")}
    assert inside & set(dir(DataStream)) == {"close"}
