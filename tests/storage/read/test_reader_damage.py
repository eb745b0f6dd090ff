"""What a reader believes: heads that pages do not bear out, and damage inside of pages."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from datastreamer.errors import CorruptEntries, DamagedEntry
from datastreamer.storage.header.records import Head
from datastreamer.storage.read.page_scan import doubt
from datastreamer.storage.read.reader import Reader
from datastreamer.storage.read.spans import Cursor
from tests.storage.counted import HISTORY, Counted, open_reader
from tests.storage.made import FIRST, PAGE, Scanned, header_of, make, scan_file


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp("reader") / "s.bin", *HISTORY, index="memory")


@pytest.fixture(scope="module")
def scanned(path: Path) -> list[Scanned]:
    return scan_file(path)


# The head at the start of a page, behind padding: what a truncation leaves there.


@pytest.mark.parametrize("number", [202, 206])
def test_a_head_behind_padding(path: Path, scanned: list[Scanned], number: int) -> None:
    head = Head(scanned[number].offset, number)
    file, reader = open_reader(path, head)
    assert doubt(file, head) == ""
    assert [e.number for run in reader.batches(0) for e in run] == [*range(number)]
    assert reader.cursor(number) == head
    last = scanned[number - 1]
    end = last.offset + 17 + len(last.data)
    assert end < head.length
    assert reader.span(Cursor(last.offset, last.number)) == (last.offset, end, head)
    assert reader.run(Cursor(last.offset, last.number))[1] == head
    assert reader.chunk(Cursor(last.offset, last.number), PAGE).next == head
    # From before the padding there is nothing more to come.
    batch, place = reader.run(Cursor(end, number))
    assert (len(batch), place) == (0, head)
    assert reader.entry(number - 1).data == last.data
    file.close()


def test_a_head_behind_what_is_no_padding(
    path: Path, scanned: list[Scanned], tmp_path: Path
) -> None:
    last = scanned[201]
    end = last.offset + 17 + len(last.data)
    for change in (b"\x09", b"\x02\0\xff\xff\xff"):
        _, reader = damaged(path, tmp_path / "d.bin", (end, change))
        reader.head = Head(FIRST + 2 * PAGE, 202)
        with pytest.raises(DamagedEntry) as caught:
            list(reader.batches(0))
        assert caught.value.offset == end


def test_a_head_behind_a_full_page(path: Path, scanned: list[Scanned]) -> None:
    head = Head(FIRST + PAGE, 2)
    file, reader = open_reader(path, head)
    assert doubt(file, head) == ""
    assert reader.span(Cursor(FIRST, 0)) == (FIRST, FIRST + PAGE, head)
    assert [e.number for run in reader.batches(0) for e in run] == [0, 1]
    file.close()


# Heads that cannot be.


@pytest.mark.parametrize(
    ("length", "entries", "why"),
    [
        (FIRST, 0, ""),
        (FIRST + 1017, 1, ""),
        (FIRST + 1017, 2, "the last entry is 0, which does not match the header"),
        (FIRST + 1018, 1, f"at byte {FIRST + 1017}: an entry is cut off"),
        (FIRST + 1016, 1, f"at byte {FIRST}: an entry is cut off"),
        (FIRST + PAGE, 1, "the last entry is 1, which does not match the header"),
        (FIRST + PAGE + 5, 2, f"at byte {FIRST + PAGE}: an entry is cut off"),
        (FIRST + 2 * PAGE, 201, "the last entry is 201, which does not match the header"),
        (FIRST + 2 * PAGE - 1, 202, "there is padding"),
        (FIRST + 17, 0, "an empty stream ends with the header page"),
        (FIRST + 900 * PAGE, 202, "the file ends before"),
        (FIRST + 6 * PAGE + 100, 211, f"at byte {FIRST + 6 * PAGE + 74}: there is padding"),
    ],
)
def test_doubt(path: Path, length: int, entries: int, why: str) -> None:
    file, _ = open_reader(path)
    said = doubt(file, Head(length, entries))
    assert said.endswith(why) if why else said == ""
    file.close()


@pytest.mark.parametrize(("length", "entries"), [(0, 1), (0, -1), (5, 0), (-5, 0)])
def test_a_head_that_the_entries_do_not_reach(path: Path, length: int, entries: int) -> None:
    head = Head(header_of(path)[-2] + length, 211 + entries)
    file, reader = open_reader(path, head)
    with pytest.raises(DamagedEntry) as caught:
        list(reader.batches(0))
    assert caught.value.path == str(path)
    if entries == 1:
        with pytest.raises(DamagedEntry, match="the page ends before entry 211"):
            reader.entry(211)
    file.close()


# Damage inside.


def damaged(path: Path, target: Path, *changes: tuple[int, bytes]) -> tuple[Counted, Reader]:
    content = bytearray(path.read_bytes())
    for offset, data in changes:
        content[offset : offset + len(data)] = data
    target.write_bytes(content)
    return open_reader(target)


@pytest.mark.parametrize(
    ("at", "change", "says"),
    [
        (0, b"\x03", "packet type 3"),
        (0, b"\x00", "padding"),
        (1, b"\0\0\0\5", "entry length 5"),
        (1, b"\0\x20\0\0", "entry length 2097152"),
        (1, b"\0\x10\0\0", "past the end of its page"),
        (9, b"\xff", "where 100 is due"),
    ],
)
def test_damage_in_a_page(
    path: Path, scanned: list[Scanned], tmp_path: Path, at: int, change: bytes, says: str
) -> None:
    place = scanned[100].offset
    file, reader = damaged(path, tmp_path / "d.bin", (place + at, change))
    asked: Sequence[object] = [100, 101, 201]
    for number in asked:
        with pytest.raises(DamagedEntry) as caught:
            reader.entry(number)  # type: ignore[arg-type]
        assert str(caught.value).startswith(f"{tmp_path}/d.bin: at byte {place}: ")
    runs = reader.batches(0)
    assert [e.number for _ in range(2) for e in next(runs)] == [*range(100)]
    with pytest.raises(DamagedEntry, match=says) as caught:
        next(runs)
    assert caught.value.offset == place
    with pytest.raises(DamagedEntry):
        reader.span(Cursor(place, 100))
    # All around it is read.
    assert [reader.entry(n).data for n in (0, 99, 202, 210)] == [
        scanned[n].data for n in (0, 99, 202, 210)
    ]
    assert [e.number for run in reader.batches(202) for e in run] == [*range(202, 211)]
    file.close()


@pytest.mark.parametrize("change", [b"\0", b"\x02\0\0\0\5", b"\x07"])
def test_damage_at_a_page_s_start(
    path: Path, scanned: list[Scanned], tmp_path: Path, change: bytes
) -> None:
    """The search goes by page starts: a point read may need the damaged one."""
    place = scanned[203].offset
    file, reader = damaged(path, tmp_path / "d.bin", (place, change))
    with pytest.raises(DamagedEntry) as caught:
        reader.entry(203)
    assert caught.value.offset == place
    with pytest.raises(DamagedEntry) as caught:
        list(reader.batches(202))
    assert caught.value.offset == place
    with pytest.raises(DamagedEntry) as caught:
        reader.span(Cursor(scanned[202].offset, 202))
    assert caught.value.offset == place
    assert reader.entry(210).data == b"last"
    file.close()


def test_padding_is_believed_only_with_the_next_number_behind_it(
    path: Path, scanned: list[Scanned], tmp_path: Path
) -> None:
    """A page read as zeros, by a stale cache say, is not the end of its entries."""
    start = scanned[150].offset
    zeros = bytes(FIRST + 2 * PAGE - start)
    file, reader = damaged(path, tmp_path / "d.bin", (start, zeros))
    for ask in (lambda: list(reader.batches(0)), lambda: reader.span(Cursor(start, 150))):
        with pytest.raises(DamagedEntry, match="next page does not begin with entry 150") as caught:
            ask()
        assert caught.value.offset == start
    with pytest.raises(DamagedEntry, match="ends before entry 150, after it comes entry 202"):
        reader.span(Cursor(FIRST + PAGE, 2))
    with pytest.raises(DamagedEntry, match="the page ends before entry 150, and entry 160 is due"):
        reader.entry(160)
    file.close()


def test_damage_is_looked_at_twice(
    path: Path, scanned: list[Scanned], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was wrong once and right the second time was a torn read, not damage."""
    file, reader = open_reader(path)
    reads = {"left": 0}
    read = Counted.read

    def torn(self: Counted, size: int, offset: int) -> bytes:
        found = read(self, size, offset)
        if reads["left"] and size > 17:
            reads["left"] -= 1
            return bytes(len(found))
        return found

    monkeypatch.setattr(Counted, "read", torn)
    for ask in (
        lambda: reader.entry(150),
        lambda: reader.run(Cursor(scanned[202].offset, 202)),
        lambda: reader.span(Cursor(scanned[150].offset, 150)),
        lambda: reader.cursor(77),
    ):
        reader.forget()
        reads["left"] = 1
        ask()
        assert reads["left"] == 0
        reader.forget()
        reads["left"] = 100
        with pytest.raises(DamagedEntry):
            ask()
        reads["left"] = 0
    file.close()


def test_boundary_says_damage_in_the_file_s_offsets(
    path: Path, scanned: list[Scanned], tmp_path: Path
) -> None:
    file, reader = open_reader(path)
    span = reader.span(Cursor(FIRST + PAGE, 2))
    file.close()
    file, reader = damaged(path, tmp_path / "d.bin", (scanned[50].offset, b"\x09"))
    with pytest.raises(DamagedEntry) as caught:
        reader.boundary(span, 2, span.end)
    assert caught.value.offset == scanned[50].offset
    assert not isinstance(caught.value, CorruptEntries)
    file.close()
