"""Headers that no record confirms, torn, foreign or damaged: how an open treats each."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from datastreamer import DataStream
from datastreamer.errors import (
    BadFileSize,
    DamagedEntry,
    DamagedFile,
    DamagedHeader,
    NotAStream,
    StreamFileError,
    WrongStreamType,
)
from datastreamer.storage.header import records
from datastreamer.storage.header.records import Head
from tests.conftest import Golden
from tests.storage.made import (
    FIRST,
    HEADER,
    MODES,
    ONE,
    PAGE,
    THREE,
    TWO,
    add,
    copied,
    header_of,
    items,
    make,
    record_of,
    scan_file,
    sides,
)


def rewritten(path: Path, length: int, entries: int) -> None:
    """Change the header as a program does that keeps no records."""
    content = bytearray(path.read_bytes())
    fields = [*header_of(path)]
    fields[-2:] = [length, entries]
    content[16:54] = HEADER.pack(*fields)
    path.write_bytes(content)


@pytest.mark.parametrize("mode", MODES)
def test_another_program_continued(tmp_path: Path, mode: dict[str, Any]) -> None:
    path = make(tmp_path / "s.bin", ONE, TWO)
    entries = scan_file(path)
    stream_id = record_of(path).stream_id
    # It truncated to two entries, and appended one.
    content = bytearray(path.read_bytes())
    at = entries[2].offset
    packed = b"\2" + (20).to_bytes(4, "big") + (9).to_bytes(4, "big") + (2).to_bytes(8, "big")
    content[at : at + 20] = packed + b"abc"
    path.write_bytes(content)
    rewritten(path, at + 20, 3)
    with DataStream.open(path, **mode) as stream:
        assert items(stream) == [*ONE, (9, b"abc")]
        assert stream.stream_id == stream_id
        assert stream.bookmark(b"k") == 0
        if stream.writable:
            assert stream.epoch == 1
            add(stream, THREE)
            assert items(stream) == [*ONE, (9, b"abc"), *THREE]
    assert sides(path) == []


def test_another_program_truncated_to_a_page_s_start(tmp_path: Path) -> None:
    """The total length includes the padding before that page, and the entries end earlier."""
    path = make(tmp_path / "s.bin", [(1, b"a" * 700_000)], [(2, b"b" * 400_000)])
    rewritten(path, FIRST + PAGE, 1)
    for mode in MODES:
        with DataStream.open(path, **mode) as stream:
            assert items(stream) == [(1, b"a" * 700_000)]
            assert stream.reader.cursor(1) == (FIRST + PAGE, 1)
    with DataStream.open(path) as stream:
        add(stream, [(3, b"c")])
        assert stream.reader.cursor(1) == (FIRST + PAGE, 1)


@pytest.mark.parametrize(
    ("length", "entries"),
    [(0, 1), (0, -1), (1, 0), (-1, 0), (17, 1), (-17, -1), (1000, 0)],
    ids=str,
)
@pytest.mark.parametrize("mode", MODES)
def test_a_torn_header_is_refused(
    tmp_path: Path, mode: dict[str, Any], length: int, entries: int
) -> None:
    """The error names the ends that are known to have been on disk."""
    path = make(tmp_path / "s.bin", ONE, [(1, b"x" * 900_000)], [(2, b"y" * 900_000)])
    total, count = header_of(path)[-2:]
    rewritten(path, total + length, count + entries)
    before = path.read_bytes()
    with pytest.raises(DamagedHeader) as caught:
        DataStream.open(path, **mode)
    assert caught.value.path == str(path)
    assert caught.value.offset == 16
    said = str(caught.value)
    assert f"ends with {count + entries} entries at byte {total + length}" in said
    assert said.endswith(f"ends that were on disk: entry 4 at byte {total}")
    assert path.read_bytes() == before


def test_candidates_are_the_last_two_synced_ends(tmp_path: Path) -> None:
    path = tmp_path / "s.bin"
    with DataStream.create(path) as stream:
        ends = []
        for operation in (ONE, TWO, THREE):
            add(stream, operation)
            ends.append((stream.total_entries, stream.header.total_length))
        found = copied(path, "found.bin")
    rewritten(found, ends[-1][1] + 1, ends[-1][0])
    with pytest.raises(DamagedHeader) as caught:
        DataStream.open(found)
    want = ", ".join(f"entry {entries} at byte {length}" for entries, length in ends[:0:-1])
    assert str(caught.value).endswith(f"ends that were on disk: {want}")


def test_a_header_without_a_synced_header(tmp_path: Path, golden: Golden) -> None:
    path = golden.unpack("small")
    rewritten(path, 4849, 15)
    with pytest.raises(DamagedHeader, match="no other end is recorded"):
        DataStream.open(path)


def test_a_record_about_another_header(tmp_path: Path) -> None:
    """Its sum matches, its end does not: no writer of this package writes that."""
    path = make(tmp_path / "s.bin", ONE, TWO)
    content = bytearray(path.read_bytes())
    page = content[:FIRST]
    records.put_record(page, record_of(path)._replace(after=Head(FIRST + 18, 1)))
    content[:FIRST] = page
    path.write_bytes(content)
    with pytest.raises(DamagedHeader, match="the commit record is about another header"):
        DataStream.open(path)


# Damaged files that the reference was tested with: how this package treats each.

OPENED: dict[str, tuple[type[StreamFileError] | None, str]] = {
    "open: good": (None, ""),
    "open: empty file (0 bytes)": (NotAStream, "not a stream file: it is empty"),
    "open: 15 bytes": (NotAStream, "does not begin with polygonDATSTREAM"),
    "open: 4095 bytes": (NotAStream, "the header page is cut at byte 4095"),
    "open: header page only, totalLength says 4849": (
        BadFileSize,
        "at byte 4096: the file ends here, but its data ends at byte 4849",
    ),
    "open: one byte missing at the end": (
        BadFileSize,
        r"at byte 1052671: the file's size is 1052671 bytes, not 4096 \+ k x 1048576",
    ),
    "open: one byte more at the end": (BadFileSize, "the file's size is 1052673 bytes"),
    "open: wrong magic": (NotAStream, "does not begin with polygonDATSTREAM"),
    "open: header packetType 2": (DamagedHeader, "at byte 16: the header's packet type is 2"),
    "open: headerLength 39": (DamagedHeader, "at byte 16: the header's length is 39, not 38"),
    "open: streamType 2 in the file": (WrongStreamType, "the stream is of type 2, not 1"),
    "open: version 9 in the file": (None, ""),
    "open: totalLength past the file": (BadFileSize, "its data ends at byte 1052673"),
    "open: totalLength 2^64-1": (DamagedHeader, "at byte 38: .* 18446744073709551615 is not"),
    "open: totalLength 0": (DamagedHeader, "at byte 38: the header's total length 0 is not"),
    "open: totalLength 4095": (DamagedHeader, "at byte 38: the header's total length 4095 is"),
    "open: totalEntries 17 (one too many)": (DamagedHeader, "17 entries at byte 4849"),
    "open: totalEntries 15 (one too few)": (DamagedHeader, "15 entries at byte 4849"),
    "open: entry 3: packetType 9": (DamagedHeader, "at byte 4149: packet type 9"),
    "open: entry 3: packetType 0": (DamagedHeader, "at byte 4149: there is padding"),
    "open: entry 3: length 16": (DamagedHeader, "at byte 4149: entry length 16"),
    "open: entry 3: length 0xffffffff": (DamagedHeader, "at byte 4149: entry length 4294967295"),
    "open: entry 3: number 4": (DamagedHeader, "at byte 4149: entry number 4 where 3 is due"),
}


def opened_cases(golden: Golden) -> dict[str, dict[str, Any]]:
    import json

    cases = json.loads((golden.folder / "api.json").read_text())
    return {case["name"]: case for case in cases if case["name"].startswith("open: ")}


def test_the_cases_are_complete(golden: Golden) -> None:
    assert opened_cases(golden).keys() == OPENED.keys()


def case_file(golden: Golden, name: str) -> Path:
    """The file of a case: small.bin, truncated or changed."""
    case = opened_cases(golden)[name]["file"]
    content = bytearray(golden.content("small")[: FIRST + PAGE])
    if "patch_hex" in case:
        patch = bytes.fromhex(case["patch_hex"])
        content[case["patch_offset"] : case["patch_offset"] + len(patch)] = patch
    size = case.get("size", len(content))
    path = golden.scratch / "case.bin"
    path.write_bytes(content[:size].ljust(size, b"\0"))
    return path


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", OPENED)
def test_opening(golden: Golden, name: str, mode: dict[str, Any]) -> None:
    path = case_file(golden, name)
    before = path.read_bytes()
    error, says = OPENED[name]
    if error is None:
        with DataStream.open(path, stream_type=1, **mode) as stream:
            assert stream.header.version == (9 if "version 9" in name else 2)
            assert stream.total_entries == 16
        return
    with pytest.raises(error, match=says) as caught:
        DataStream.open(path, stream_type=1, **mode)
    assert str(caught.value).startswith(f"{path}: ")
    assert str(caught.value).count("\n") == 0
    if isinstance(caught.value, DamagedFile):
        assert f"at byte {caught.value.offset}: " in str(caught.value)
    assert path.read_bytes() == before
    assert [p.name for p in path.parent.iterdir()] == ["case.bin"]


@pytest.mark.parametrize(
    ("patch", "says"),
    [
        ((0, b"\x09"), "packet type 9 is neither"),
        ((0, b"\x00"), "the page ends before entry 3, and entry 7 is due"),
        ((1, b"\x00\x00\x00\x10"), "entry length 16 does not"),
        ((1, b"\xff\xff\xff\xff"), "entry length 4294967295 is above"),
        ((9, (4).to_bytes(8, "big")), "entry number 4 where 3 is due"),
    ],
)
def test_damage_that_only_reading_finds(
    golden: Golden, patch: tuple[int, bytes], says: str
) -> None:
    """If the commit record confirms the header, an open does not read the entries."""
    path = golden.unpack("small")
    with DataStream.open(path):
        pass
    content = bytearray(path.read_bytes())
    at, change = 4149 + patch[0], patch[1]
    content[at : at + len(change)] = change
    path.write_bytes(content)
    with DataStream.open(path, read_only=True) as stream:
        assert stream.total_entries == 16
        # The entries before the damage can be read.
        assert stream.entry(2).data == b"\xfc"
        assert stream.reader.cursor(2).offset == 4131
        assert stream.reader.first_event(0).number == 1
        started = iter(stream.entries())
        assert [next(started).number for _ in range(3)] == [0, 1, 2]
        calls: list[Callable[[], object]] = [
            lambda: next(started),
            lambda: stream.entry(3),
            lambda: stream.entry(15),
            lambda: stream.reader.cursor(15),
            lambda: list(stream.entries()),
            lambda: list(stream.entries(3)),
            lambda: stream.bookmark(b"xxxx"),
        ]
        for call in calls:
            with pytest.raises(DamagedEntry) as caught:
                call()
            assert caught.value.path == str(path)
            assert caught.value.offset == 4149
        with pytest.raises(DamagedEntry, match=f"at byte 4149: .*{says}"):
            stream.entry(7)


@pytest.mark.parametrize("offset", [21, 29, 37], ids=["version", "system id", "stream type"])
def test_a_damaged_identity_does_not_look_like_another_program(tmp_path: Path, offset: int) -> None:
    path = tmp_path / "stream.bin"
    with DataStream.create(path, version=2, system_id=7) as stream, stream.atomic_op() as op:
        op.add_entry(1, b"data")
    content = bytearray(path.read_bytes())
    content[offset] ^= 0x40
    path.write_bytes(content)
    for read_only in (True, False):
        with pytest.raises(DamagedHeader, match="version 2, system id 7, stream type 1"):
            DataStream.open(path, read_only=read_only)
    assert path.read_bytes() == content
