"""What is stored in a stream is changed: updates, truncations, and what is notified of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from datastreamer import DataStream
from datastreamer.errors import BadEntryType, UnknownEntry, UpdateRefused
from datastreamer.storage.parts import ChangeBegins, ChangeEnds
from tests.storage.made import (
    BOOKMARK,
    FIRST,
    LARGEST,
    ONE,
    PAGE,
    TWO,
    add,
    copied,
    header_of,
    items,
    power_cut,
    scan_file,
)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "s.bin"


# Updates.


def test_update(path: Path) -> None:
    with DataStream.create(path) as stream:
        add(stream, [(BOOKMARK, b"k"), (1, b"old"), (2, b""), (3, bytes(500_000)), (1, b"last")])
        length = stream.header.total_length
        stream.update_entry(1, 1, b"new")
        stream.update_entry(2, 2, b"")
        stream.update_entry(3, 3, b"x" * 500_000)
        stream.update_entry(4, 1, bytearray(b"tsal"))
        assert stream.epoch == 4
        want = [(BOOKMARK, b"k"), (1, b"new"), (2, b""), (3, b"x" * 500_000), (1, b"tsal")]
        assert items(stream) == want
        assert (stream.header.total_length, stream.total_entries) == (length, 5)
        assert stream.bookmark(b"k") == 0
    assert [(e.type, e.data) for e in scan_file(path)] == want


@pytest.mark.parametrize(
    ("error", "says", "number", "kind", "data"),
    [
        (UnknownEntry, "no entry 3", 3, 1, b"one"),
        (UnknownEntry, "no entry -1", -1, 1, b"one"),
        (UnknownEntry, "no entry 18446744073709551615", 2**64 - 1, 1, b"one"),
        (UpdateRefused, "is of type 1, not 2", 1, 2, b"one"),
        (UpdateRefused, "has 3 bytes, not 2", 1, 1, b"on"),
        (UpdateRefused, "has 3 bytes, not 4", 1, 1, b"once"),
        (UpdateRefused, "entry 0 is a bookmark", 0, BOOKMARK, b"l"),
        (UpdateRefused, "entry 0 is a bookmark", 0, 1, b"l"),
        (BadEntryType, "0xb0 is the type of bookmarks", 1, BOOKMARK, b"one"),
    ],
)
def test_update_refuses(
    path: Path, error: type[Exception], says: str, number: int, kind: int, data: bytes
) -> None:
    with DataStream.create(path) as stream:
        add(stream, [*ONE, (2, b"")])
        before = path.read_bytes()
        with pytest.raises(error, match=says):
            stream.update_entry(number, kind, data)
        assert path.read_bytes() == before
        assert stream.epoch == 0


def test_an_update_takes_bytes(path: Path) -> None:
    with DataStream.create(path) as stream:
        add(stream, ONE)
        for wrong in (3, "new", None, [1, 2, 3]):
            with pytest.raises(TypeError):
                stream.update_entry(1, 1, wrong)  # type: ignore[arg-type]
        assert items(stream) == ONE


@pytest.mark.parametrize("sync", ["commit", "os"])
def test_an_update_is_on_disk_and_nothing_is_left_to_judge(path: Path, sync: Any) -> None:
    with DataStream.create(path, sync=sync, index="memory") as stream:
        add(stream, ONE, TWO)
        stream.update_entry(1, 1, b"new")
        found = copied(path, "found.bin")
    cut = power_cut(found, path.with_name("cut.bin"))
    with DataStream.open(cut) as stream:
        assert items(stream) == [ONE[0], (1, b"new"), *TWO]


# Truncation.


@pytest.mark.parametrize("sync", ["commit", "os"])
def test_truncate(path: Path, sync: Any) -> None:
    with DataStream.create(path, sync=sync) as stream:
        add(stream, ONE, TWO, [(3, b"three")])
        stream.truncate(3)
        assert items(stream) == (ONE + TWO)[:3]
        assert stream.epoch == 1
        assert stream.bookmark(b"k") == 0
        for number in (3, 4, -1):
            with pytest.raises(UnknownEntry):
                stream.truncate(number)
        add(stream, [(4, b"four")])
        assert items(stream) == [*(ONE + TWO)[:3], (4, b"four")]
        stream.truncate(0)
        assert header_of(path)[-2:] == (FIRST, 0)
        assert items(stream) == []
        with pytest.raises(UnknownEntry, match="the stream holds none"):
            stream.truncate(0)
        add(stream, ONE)
        found = copied(path, "found.bin")
    assert [(e.type, e.data) for e in scan_file(path)] == ONE
    with DataStream.open(power_cut(found, path.with_name("cut.bin"))) as stream:
        assert items(stream) == ONE


@pytest.mark.parametrize("sizes", [(700_000, 700_000), (LARGEST, 5), (LARGEST - 1, 5)])
def test_truncation_to_a_page_s_start(path: Path, sizes: tuple[int, int]) -> None:
    """The padding before it stays in the total, as the reference has it."""
    with DataStream.create(path) as stream:
        add(stream, [(1, b"a" * sizes[0])], [(2, b"b" * sizes[1]), (3, b"c")])
        stream.truncate(1)
        assert stream.header.total_length == FIRST + PAGE
        assert items(stream) == [(1, b"a" * sizes[0])]
        assert list(stream.entries(1)) == []
        found = copied(path, "found.bin")
        with DataStream.open(path, follow=True) as follower:
            assert items(follower) == items(stream)
        add(stream, [(4, b"d")])
        assert items(stream) == [(1, b"a" * sizes[0]), (4, b"d")]
        assert stream.reader.cursor(1) == (FIRST + PAGE, 1)
    with DataStream.open(path) as stream:
        assert items(stream) == [(1, b"a" * sizes[0]), (4, b"d")]
    with DataStream.open(power_cut(found, path.with_name("cut.bin"))) as stream:
        assert items(stream) == [(1, b"a" * sizes[0])]
        add(stream, [(5, b"e")])
        found = copied(path.with_name("cut.bin"), "again.bin")
    with DataStream.open(power_cut(found, path.with_name("cut2.bin"))) as stream:
        assert items(stream) == [(1, b"a" * sizes[0]), (5, b"e")]


def test_changes_are_announced(path: Path) -> None:
    with DataStream.create(path) as stream:
        add(stream, ONE, TWO)
        reported: list[tuple[ChangeBegins | ChangeEnds, int, bytes]] = []

        def note(event: ChangeBegins | ChangeEnds) -> None:
            reported.append((event, stream.total_entries, stream.entry(1).data))

        end = stream.parts.feed.subscribe(note)
        stream.update_entry(1, 1, b"new")
        stream.truncate(2)
        with pytest.raises(UnknownEntry):
            stream.truncate(2)
        with pytest.raises(UpdateRefused):
            stream.update_entry(1, 1, b"")
        assert reported == [
            (ChangeBegins(1, 2), 4, b"one"),
            (ChangeEnds(1, 2), 4, b"new"),
            (ChangeBegins(2, None), 4, b"new"),
            (ChangeEnds(2, None), 2, b"new"),
        ]
        end()
        stream.truncate(0)
        assert len(reported) == 4
