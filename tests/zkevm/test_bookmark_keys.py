"""Bookmark keys: the two encodings, and what is none of them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from datastreamer.errors import BadBookmark
from datastreamer.zkevm.bookmark_keys import BookmarkName, key_of, name_of_key, raw_key

U64 = 2**64 - 1
marks = st.builds(BookmarkName, st.sampled_from(["block", "batch"]), st.integers(0, U64))


@pytest.mark.parametrize(
    "version, mark, key",
    [
        (1, BookmarkName("block", 0), "000000000000000000"),
        (1, BookmarkName("block", 258), "000000000000000102"),
        (1, BookmarkName("batch", U64), "01ffffffffffffffff"),
        (2, BookmarkName("batch", 0), "0801"),
        (2, BookmarkName("batch", 1), "08011001"),
        (2, BookmarkName("batch", 300), "080110ac02"),
        (3, BookmarkName("block", 0), "0802"),
        (3, BookmarkName("block", U64), "080210ffffffffffffffffff01"),
    ],
)
def test_known_keys(version: int, mark: BookmarkName, key: str) -> None:
    assert key_of(version, mark).hex() == key
    assert name_of_key(version, bytes.fromhex(key)) == mark


@given(st.sampled_from([1, 2, 3, 255]), marks)
def test_every_mark_comes_back(version: int, mark: BookmarkName) -> None:
    key = key_of(version, mark)
    assert 1 <= len(key) <= 16
    assert name_of_key(version, key) == mark


@given(st.sampled_from([1, 2]), st.binary(max_size=20))
def test_what_is_read_is_written_that_way(version: int, key: bytes) -> None:
    mark = name_of_key(version, key)
    if mark is not None and version == 1:
        assert key_of(version, mark) == key
    elif mark is not None:
        # A varint can be written longer than it need be.
        assert name_of_key(version, key_of(version, mark)) == mark


@pytest.mark.parametrize(
    "version, key",
    [
        (1, "0800"),
        (1, "020000000000000000"),  # no such type
        (2, ""),
        (2, "08"),
        (2, "0803"),
        (2, "10010801"),  # out of order
        (2, "08010801"),
        (2, "0a0100"),
        (2, "08011080"),  # cut off
        (2, "080110ffffffffffffffffff02"),  # more than a u64
        (2, "080110ffffffffffffffffffff01"),
        (2, "000000000000000102"),
    ],
)
def test_other_keys_are_no_marks(version: int, key: str) -> None:
    assert name_of_key(version, bytes.fromhex(key)) is None


def test_raw_keys() -> None:
    assert raw_key(1, 7, 5).hex() == "070000000000000005"
    assert raw_key(2, 0, 5).hex() == "1005"
    assert raw_key(2, 200, 0).hex() == "08c801"


@pytest.mark.parametrize(
    "version, kind, number, message",
    [
        (1, 256, 0, "type must be 0 to 255"),
        (1, -1, 0, "type must be 0 to 255"),
        (2, 1, U64 + 1, "number must be 0 to"),
        (2, 0, 0, "has no key"),
    ],
)
def test_keys_that_cannot_be(version: int, kind: int, number: int, message: str) -> None:
    with pytest.raises(BadBookmark, match=message):
        raw_key(version, kind, number)


def test_the_real_stream_names_its_bookmarks_so(real_stream: object) -> None:
    from tests.interop.plain import BOOKMARK, scan

    entries = [entry for entry in scan(real_stream) if entry.type == BOOKMARK]  # type: ignore[arg-type]
    found = [name_of_key(2, entry.data) for entry in entries]
    assert None not in found
    assert [key_of(2, mark) for mark in found if mark] == [entry.data for entry in entries]
    assert [m.number for m in found if m and m.kind == "batch"] == list(range(102))
