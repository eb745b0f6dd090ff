"""What is changed of a stream with damaged pages: nothing that would hide the damage."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from datastreamer import DataStream
from datastreamer._codec import Entry
from datastreamer.errors import DamagedPage, UpdateRefused
from datastreamer.storage.maintain.check import verify
from tests.storage.made import BOOKMARK, FIRST, PAGE, Item, add, evict, items, make, page_sums

SIZE = 200_000
TOTAL = 21
LAST = 3
# The first entries of the pages, and the total.
FIRSTS = [0, 6, 12, 18, TOTAL]


def entry(number: int) -> Item:
    """Each page begins with an event, and has one bookmark."""
    if number % 6 == 1:
        return BOOKMARK, b"%d" % number
    return 1, bytes([number]) * SIZE


@pytest.fixture
def path(tmp_path: Path) -> Path:
    made = make(tmp_path / "s.bin", *([entry(number)] for number in range(TOTAL)))
    with DataStream.open(made, read_only=True) as stream:
        assert [stream.reader.first_number(page) for page in range(LAST + 1)] == FIRSTS[:-1]
    return made


def damage(path: Path, page: int) -> None:
    """The first entry of the page: `update` has others."""
    with path.open("r+b") as file:
        file.seek(FIRST + page * PAGE + 1000)
        file.write(b"!")
    evict(path)


def update(number: int) -> bytes:
    return bytes([100 + number]) * SIZE


def packed(page: int, *updated: int) -> bytes:
    """The entries of a page, some of which are updated."""
    parts = []
    for number in range(FIRSTS[page], FIRSTS[page + 1]):
        kind, data = entry(number)
        parts.append(Entry(number, kind, update(number) if number in updated else data).pack())
    return b"".join(parts)


pages = pytest.mark.parametrize("page", [0, 1, LAST])


@pages
@pytest.mark.parametrize("verifies", ["never", "cold", "always"])
def test_a_change_is_refused(path: Path, page: int, verifies: Any) -> None:
    """It would make a new checksum. The error says what to do, whatever the reader noticed."""
    first, end = FIRSTS[page : page + 2]
    with DataStream.open(path, index="memory", verify=verifies) as stream:
        called: list[int] = []
        stream.parts.feed.subscribe(lambda event: called.append(event.start))
        damage(path, page)
        before = path.read_bytes()
        for change in (
            lambda: stream.update_entry(first, 1, update(first)),
            lambda: stream.truncate(first + 1),
        ):
            with pytest.raises(DamagedPage) as error:
                change()
            assert str(error.value).endswith(
                f"page {page} (entries {first} to {end - 1}): the entries do not match their "
                "checksum: it is damaged, and is not changed; `datastreamer repair "
                f"{path} --from HOST:PORT` restores it"
            )
        assert path.read_bytes() == before
        assert not called
        assert stream.epoch == 0
        stream.truncate(first)  # nothing of the page remains
        assert called == [first, first]
        assert items(stream) == [entry(number) for number in range(first)]
        add(stream, [entry(first)])
    assert verify(path).problems == []


@pages
@pytest.mark.parametrize("opened", ["before", "after"])
def test_a_page_is_replaced(path: Path, page: int, opened: str) -> None:
    """By entries one of which is updated. A last page that is damaged when the stream is opened is
    continued in the next one."""
    first, end = FIRSTS[page : page + 2]
    if opened == "after":
        damage(path, page)
    with DataStream.open(path, index="memory", verify="never") as stream:
        if opened == "before":
            damage(path, page)
        (found,) = stream.parts.pages.damaged(end - 1, end)
        assert (found.page, found.first, found.end) == (page, first, end)
        for offset in (found.offset - PAGE, found.offset, found.offset + PAGE):
            assert [it.page for it in stream.parts.pages.damaged_around(offset)] == [page]
        assert stream.parts.pages.damaged_around(found.offset + 2 * PAGE) == []
        kept = stream.parts.relay.replace_page(page, packed(page, end - 1))
        assert Path(kept).read_bytes()[FIRST + 1000] == ord("!")
        wanted = [entry(number) for number in range(TOTAL)]
        wanted[end - 1] = 1, update(end - 1)
        assert items(stream) == wanted
        for kind, data in wanted:
            assert kind != BOOKMARK or stream.bookmark(data) == int(data)
        # Two entries differ, the damaged one and the updated one, and no change says which.
        assert stream.epoch == 4
        assert stream.recorded_changes(0) is None
        assert stream.parts.relay.replace_page(page, packed(page)) == ""
        assert stream.epoch == 4
        add(stream, [entry(TOTAL)])
        assert items(stream) == [*wanted, entry(TOTAL)]
    assert verify(path).problems == []
    page_sums(path)


@pages
def test_other_entries_do_not_fit(path: Path, page: int) -> None:
    with DataStream.open(path, index="memory", verify="never") as stream:
        damage(path, page)
        before, whole, end = path.read_bytes(), packed(page), FIRSTS[page + 1]
        shorter = whole[: -SIZE - 17]
        for entries in (
            b"",
            shorter,
            whole + Entry(end, 1, b"").pack(),
            shorter + Entry(end - 1, 1, bytes(SIZE + 1)).pack(),
            shorter + Entry(end - 1, 1, bytes(SIZE - 1)).pack(),
            whole[:-1],
            packed(2),
        ):
            with pytest.raises(UpdateRefused, match="do not fit in their place"):
                stream.parts.relay.replace_page(page, entries)
        assert path.read_bytes() == before
        assert stream.epoch == 0
