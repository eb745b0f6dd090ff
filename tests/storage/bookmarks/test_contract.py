"""The contract of every bookmark index; a new backend needs to fulfil nothing else.

The suite runs on each backend. `toy` is registered here and nowhere else: it is used
through `DataStream` like the others, and no other file names it.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from datastreamer import DataStream
from datastreamer.errors import BadBookmark, UnknownBookmark
from datastreamer.storage.bookmarks import registry
from datastreamer.storage.bookmarks.interface import (
    BookmarkIndex,
    IndexReadOnly,
    Pace,
    Watermark,
    at_once,
)
from datastreamer.storage.disk.access import Access
from tests.storage.made import BOOKMARK, add

HERE = Watermark(5000, 10, b"identity of the file")
LATER = Watermark(9000, 20, b"another identity")


class ToyIndex(BookmarkIndex):
    """A JSON file beside the stream, replaced at each write."""

    def __init__(self, path: Path, write: bool) -> None:
        self.path = path
        if not path.exists():
            if not write:
                raise IndexReadOnly(path, "there is no toy index")
            self.clear()

    def _load(self) -> tuple[Watermark | None, list[tuple[bytes, int]]]:
        mark, pairs = json.loads(self.path.read_text())
        found = Watermark(mark[0], mark[1], bytes.fromhex(mark[2])) if mark else None
        return found, [(bytes.fromhex(key), number) for key, number in pairs]

    def _store(self, mark: Watermark | None, pairs: Iterable[tuple[bytes, int]]) -> None:
        packed = [mark.length, mark.entries, mark.identity.hex()] if mark else None
        aside = self.path.with_suffix(".new")
        aside.write_text(json.dumps([packed, [(key.hex(), number) for key, number in pairs]]))
        aside.replace(self.path)

    def watermark(self) -> Watermark | None:
        return self._load()[0]

    def newest(self, key: bytes) -> int | None:
        return max((number for known, number in self._load()[1] if known == key), default=None)

    def add(
        self, bookmarks: Iterable[tuple[bytes, int]], watermark: Watermark, pace: Pace = at_once
    ) -> None:
        self._store(watermark, [*self._load()[1], *bookmarks])

    def remove(self, bookmarks: Iterable[tuple[bytes, int]], watermark: Watermark) -> None:
        removed = set(bookmarks)
        self._store(watermark, [pair for pair in self._load()[1] if pair not in removed])

    def clear(self) -> None:
        self._store(None, [])

    def __len__(self) -> int:
        return len({key for key, _ in self._load()[1]})

    def close(self) -> None:
        """There is nothing to release."""


@pytest.fixture(scope="module", autouse=True)
def _toy() -> Iterator[None]:
    registry.register_index("toy", lambda path, write, access: ToyIndex(Path(path + ".toy"), write))
    yield
    del registry._openers["toy"]


BACKENDS = ["lmdb", "memory", "lmdb-or-memory", "toy"]


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def index(backend: str, tmp_path: Path) -> Iterator[BookmarkIndex]:
    opened = registry.index_opener(backend)(str(tmp_path / "s.bin"), True, Access.private())
    yield opened
    opened.close()


# The index alone.


def test_new(index: BookmarkIndex) -> None:
    assert index.watermark() is None
    assert index.newest(b"x") is None
    assert len(index) == 0


def test_adds_and_finds(index: BookmarkIndex) -> None:
    index.add([(b"a", 3), (b"0123456789abcdef", 5), (b"\0", 2), (b"\xff" * 16, 2**63)], HERE)
    assert index.watermark() == HERE
    assert index.newest(b"a") == 3
    assert index.newest(b"0123456789abcdef") == 5
    assert index.newest(b"\0") == 2
    assert index.newest(b"\xff" * 16) == 2**63
    assert len(index) == 4


def test_similar_keys_are_different(index: BookmarkIndex) -> None:
    index.add([(b"ab", 1)], HERE)
    for key in (b"a", b"abc", b"ab\0", b"\0ab", b"AB"):
        assert index.newest(key) is None


def test_a_watermark_alone(index: BookmarkIndex) -> None:
    index.add([], HERE)
    assert index.watermark() == HERE
    assert len(index) == 0
    index.add([], LATER)
    assert index.watermark() == LATER


def test_the_newest_entry_is_found(index: BookmarkIndex) -> None:
    index.add([(b"k", 1), (b"k", 4), (b"other", 2)], HERE)
    assert index.newest(b"k") == 4
    index.add([(b"k", 300)], LATER)
    assert index.newest(b"k") == 300
    assert len(index) == 2


def test_after_a_removal_the_earlier_entry_is_found(index: BookmarkIndex) -> None:
    index.add([(b"k", 1), (b"k", 4), (b"k", 9), (b"x", 8)], HERE)
    index.remove([(b"k", 9), (b"x", 8)], LATER)
    assert index.newest(b"k") == 4
    assert index.newest(b"x") is None
    assert index.watermark() == LATER
    assert len(index) == 1
    index.remove([(b"k", 4), (b"k", 1)], HERE)
    assert index.newest(b"k") is None
    assert len(index) == 0


def test_removing_a_missing_bookmark(index: BookmarkIndex) -> None:
    index.add([(b"k", 1)], HERE)
    index.remove([(b"k", 2), (b"unknown", 1)], LATER)
    assert index.newest(b"k") == 1


def test_clear(index: BookmarkIndex) -> None:
    index.add([(b"k", 1)], HERE)
    index.clear()
    assert (index.watermark(), index.newest(b"k"), len(index)) == (None, None, 0)
    index.add([(b"k", 7)], LATER)
    assert index.newest(b"k") == 7


def test_close_twice(index: BookmarkIndex) -> None:
    index.close()
    index.close()


def test_many(index: BookmarkIndex) -> None:
    index.add(((number.to_bytes(4, "little"), number) for number in range(30_000)), HERE)
    assert len(index) == 30_000
    assert [index.newest(n.to_bytes(4, "little")) for n in range(0, 30_000, 3001)] == [
        *range(0, 30_000, 3001)
    ]


def test_look_ups_in_other_threads(index: BookmarkIndex) -> None:
    index.add([(b"k", 5)], HERE)
    found: list[int | None] = []
    threads = [threading.Thread(target=lambda: found.append(index.newest(b"k"))) for _ in "1234"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [5, 5, 5, 5]


@pytest.mark.parametrize("kept", ["lmdb", "toy"])
def test_kept_over_a_close(tmp_path: Path, kept: str) -> None:
    path = str(tmp_path / "s.bin")
    written = registry.index_opener(kept)(path, True, Access.private())
    written.add([(b"k", 5), (b"k", 6)], HERE)
    written.close()
    for write in (False, True):
        again = registry.index_opener(kept)(path, write, Access.private())
        assert (again.watermark(), again.newest(b"k"), len(again)) == (HERE, 6, 1)
        again.close()


@pytest.mark.parametrize("kept", ["lmdb", "toy"])
def test_no_index_to_read(tmp_path: Path, kept: str) -> None:
    with pytest.raises(IndexReadOnly):
        registry.index_opener(kept)(str(tmp_path / "s.bin"), False, Access.private())
    assert list(tmp_path.iterdir()) == []


keys = st.binary(min_size=1, max_size=3) | st.sampled_from([b"k", b"l", b"\0" * 16, b"k" * 16])


@pytest.mark.parametrize("backend_name", BACKENDS)
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_against_a_model(
    tmp_path_factory: pytest.TempPathFactory, backend_name: str, data: st.DataObject
) -> None:
    """After additions of ascending numbers and removals it equals a dictionary of lists."""
    index = registry.index_opener(backend_name)(
        str(tmp_path_factory.mktemp("model") / "s.bin"), True, Access.private()
    )
    pairs: list[tuple[bytes, int]] = []
    number = 0
    for _ in range(data.draw(st.integers(1, 6), label="steps")):
        if pairs and data.draw(st.booleans(), label="remove"):
            at = data.draw(st.integers(0, len(pairs)))
            mark = Watermark(4096, at, b"cut")
            index.remove(pairs[at:], mark)
            del pairs[at:]
        else:
            new = []
            for key in data.draw(st.lists(keys, max_size=5)):
                new.append((key, number))
                number += data.draw(st.integers(1, 300))
            mark = Watermark(4096, number, b"on")
            index.add(new, mark)
            pairs += new
        known = dict(pairs)
        assert {key: index.newest(key) for key in known} == known
        assert len(index) == len(known)
        assert index.watermark() == mark
    index.close()


# Through a stream.


def test_through_a_stream(tmp_path: Path, backend: str) -> None:
    path = tmp_path / "s.bin"
    with DataStream.create(path, index=backend) as stream:
        add(stream, [(BOOKMARK, b"k"), (1, b"one")], [(BOOKMARK, b"k"), (2, b"two")])
        add(stream, [(BOOKMARK, b"a" * 16), (BOOKMARK, b"\0"), (3, b"three")])
        assert [stream.bookmark(key) for key in (b"k", b"a" * 16, b"\0")] == [2, 4, 5]
        stream.bookmarks.wait()
        assert stream.bookmarks.lag() == 0
        assert [stream.bookmark(key) for key in (b"k", b"a" * 16, b"\0")] == [2, 4, 5]
        assert len(stream.bookmarks) == 3
        stream.truncate(2)
        assert stream.bookmark(b"k") == 0
        with pytest.raises(UnknownBookmark, match="no bookmark 0x00 in"):
            stream.bookmark(b"\0")
        add(stream, [(4, b"four"), (BOOKMARK, b"k")])
    for mode in ({}, {"read_only": True}, {"follow": True}):
        with DataStream.open(path, index=backend, **mode) as stream:
            assert stream.bookmark(b"k") == 3
            assert stream.bookmark(b"k") == 3
            assert len(stream.bookmarks) == 1


def test_bad_keys(tmp_path: Path, backend: str) -> None:
    with DataStream.create(tmp_path / "s.bin", index=backend) as stream:
        with stream.atomic_op() as op:
            for key in (b"", b"x" * 17):
                with pytest.raises(BadBookmark, match=f"1 to 16 bytes, not {len(key)}"):
                    op.add_bookmark(key)
            assert op.add_bookmark(b"x") == 0
        for key in (b"", b"x" * 17):
            with pytest.raises(BadBookmark, match=f"1 to 16 bytes, not {len(key)}"):
                stream.bookmark(key)


def test_an_unknown_backend(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"unknown bookmark index 'nosuch'; use one of .*'lmdb'"):
        DataStream.create(tmp_path / "s.bin", index="nosuch")
    assert list(tmp_path.iterdir()) == []
