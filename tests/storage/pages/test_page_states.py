"""What a process knows of the pages of an open file: it forgets no damage, and invents no damage.

The readers of a stream and its server share the register; each test drives it as one of them does.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest

from datastreamer import DataStream
from datastreamer.errors import DamagedPage
from datastreamer.storage.disk.file_ops import Readable
from datastreamer.storage.pages.keeper import SumsKeeper
from datastreamer.storage.pages.page_states import PageRegister
from datastreamer.storage.pages.sidecar import (
    HEADER_SIZE,
    RECORD_SIZE,
    RECORDS_OFFSET,
    PageSum,
    SumsHeader,
)
from tests.network.damage import A_PAGE, FIRST, PAGE, PAGES, SIZE, flip, written
from tests.network.fixtures import append
from tests.network.model import Model
from tests.storage.made import evict

BAD = 5
FIRST_BAD = BAD * A_PAGE
TAIL = PAGES * A_PAGE
"""The first entry of the last page."""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    made = tmp_path / "s.bin"
    written(made)
    return made


def is_good(stream: DataStream, number: int) -> bool:
    return stream.entry(number).data == bytes([number % 251]) * SIZE


def is_sent(pages: PageRegister, page: int, count: int = PAGE) -> bool:
    """As a server decides, for a page that another program has read into the page cache."""
    start = FIRST + page * PAGE
    if pages.is_ready(start, count):
        return True
    try:
        pages.compare([page])
    except DamagedPage:
        return False
    return True


def tail_size(stream: DataStream) -> int:
    return stream.header.total_length - FIRST - PAGES * PAGE


def with_damaged_tail(stream: DataStream, path: Path) -> PageRegister:
    """The scrub has found the last page damaged."""
    pages = stream.parts.pages.for_server()
    flip(path, PAGES, in_memory=True)
    with pytest.raises(DamagedPage) as found:
        pages.verify_last_page()
    pages.found(found.value)
    assert not is_sent(pages, PAGES, tail_size(stream))
    return pages


def test_a_damaged_last_page_after_the_stream_has_grown(path: Path) -> None:
    """The next last page is whole: that says nothing of this one."""
    with DataStream.open(path) as stream:
        pages = with_damaged_tail(stream, path)
        while pages.whole_pages == PAGES:
            append(stream, (1, b"more" * 5000))
        assert pages.verify_last_page()
        path.read_bytes()
        assert not is_sent(pages, PAGES)
        assert [each.page for each in pages.damaged] == [PAGES]
        with pytest.raises(DamagedPage):
            stream.entry(TAIL)


def test_a_damaged_last_page_after_an_update_elsewhere(path: Path) -> None:
    with DataStream.open(path) as stream:
        pages = with_damaged_tail(stream, path)
        stream.update_entry(0, 1, b"y" * SIZE)
        assert not is_sent(pages, PAGES, tail_size(stream))
        assert [each.page for each in pages.damaged] == [PAGES]
        flip(path, PAGES, in_memory=True)
        assert is_sent(pages, PAGES, tail_size(stream))
        assert pages.verify_last_page()
        assert pages.damaged == []


@pytest.mark.parametrize("mode", [{"read_only": True}, {"follow": True}, {}])
def test_pages_that_are_read_ahead_are_compared(path: Path, mode: dict[str, Any]) -> None:
    """Also if another page is read in between."""
    flip(path, BAD)
    with DataStream.open(path, **mode) as stream:
        pages = stream.parts.pages.for_server()
        assert is_good(stream, (BAD - 1) * A_PAGE)
        assert is_good(stream, (BAD + 2) * A_PAGE)
        path.read_bytes()  # as when the disk has delivered
        assert not is_sent(pages, BAD)
        with pytest.raises(DamagedPage):
            stream.entry(FIRST_BAD)


def refuses(reader: DataStream) -> bool:
    """The damaged page; a reader that has not seen a change may look twice."""
    for _ in range(2):
        try:
            is_good(reader, FIRST_BAD)
        except DamagedPage:
            return True
        reader.refresh()
    return False


def test_a_change_elsewhere_makes_no_page_whole(path: Path) -> None:
    with DataStream.open(path) as writer, DataStream.open(path, follow=True) as reader:
        flip(path, BAD)
        for change in (None, b"y", b"z"):
            if change is not None:
                writer.update_entry(0, 1, change * SIZE)
                assert change == b"y" or reader.refresh()
                path.read_bytes()
            assert refuses(reader)


def test_a_page_without_a_proof_is_due_when_it_gets_one(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now)
    sums = Path(f"{path}.sums")
    saved = sums.read_bytes()
    sums.unlink()
    flip(path, BAD)
    with DataStream.open(path, read_only=True) as reader:
        assert not is_good(reader, FIRST_BAD)
        sums.write_bytes(saved)
        now += 3
        with pytest.raises(DamagedPage):
            is_good(reader, FIRST_BAD)


def test_a_proof_is_told_when_its_record_is_there(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Records of another copy are made again, one after the other."""
    forge(path, range(PAGES), digest=b"\x01" * 16)
    proven: list[int] = []
    with DataStream.open(path) as stream:
        records = stream._file.records()
        assert isinstance(records, SumsKeeper)
        pass_on = records.on_proven

        def count() -> None:
            proven.append(sum(record is not None for record in records.get_many(0, PAGES)))
            pass_on()

        records.on_proven = count
        stream.parts.pages.for_server()
        records.on_proven = count
        end = time.monotonic() + 20
        while None in records.get_many(0, PAGES) and time.monotonic() < end:
            time.sleep(0.01)
    assert proven
    assert proven[-1] == PAGES


def test_what_is_due_is_not_ready(path: Path) -> None:
    """Also within the second after it was found resident."""
    with DataStream.open(path) as stream:
        pages, size = stream.parts.pages.for_server(), tail_size(stream)
        assert pages.is_ready(FIRST + PAGES * PAGE, size)
        assert pages.is_ready(FIRST + BAD * PAGE, PAGE)
        flip(path, PAGES, in_memory=True)
        flip(path, BAD, in_memory=True)
        with pytest.raises(DamagedPage):
            pages.verify_last_page()
        with pytest.raises(DamagedPage):
            pages.verify(BAD)
        assert pages.ready == set()


class Otherwise:
    """A file that shows other bytes in page `BAD`."""

    def __init__(self, file: Readable) -> None:
        self.file = file
        self.calls: list[Callable[[], object]] = []
        self.differs = True

    def read(self, size: int, offset: int) -> bytes:
        data = bytearray(self.file.read(size, offset))
        if self.differs and offset == FIRST + BAD * PAGE:
            data[5000] ^= 4
        while self.calls:
            self.calls.pop()()
        return bytes(data)

    def size(self) -> int:
        return self.file.size()

    def close(self) -> None:
        pass


def test_damage_on_the_disk_only(path: Path) -> None:
    """The page cache still has the right page, which is written again."""
    path.read_bytes()
    with DataStream.open(path) as stream:
        pages = stream.parts.pages.for_server()
        disk = Otherwise(stream._file.file)
        with pytest.raises(DamagedPage) as found:
            pages.verify(BAD, past_cache=cast("Readable", disk))
        pages.found(found.value)
        assert is_good(stream, FIRST_BAD)
        assert [each.page for each in pages.damaged] == [BAD], "the disk has not changed"
        assert not pages.is_whole(BAD)
        healed = stream.parts.pages.heal(BAD, [])
        assert healed is not None
        assert healed.source == "the page cache"
        assert (healed.first, healed.stop) == (FIRST_BAD, FIRST_BAD + A_PAGE)
        pages.recompare(BAD)
        assert pages.damaged == []
        assert stream.parts.pages.heal(BAD, []) is None


def test_a_suspicion_outlasts_a_comparison_that_began_before(path: Path) -> None:
    with DataStream.open(path, read_only=True) as stream:
        file = stream._file
        slow = Otherwise(file.file)
        slow.differs = False
        read = cast("Readable", slow)
        head = lambda: file.head  # noqa: E731
        pages = PageRegister(read, str(path), file.records(), head, fd=file.file.fileno())
        slow.calls.append(lambda: pages.suspect([BAD]))  # another client found it evicted
        pages.verify(BAD)
        assert pages.is_due(BAD)
        pages.verify(BAD)
        assert pages.is_whole(BAD)


def test_the_last_page_is_compared_with_what_is_known_of_it_now(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An update between the look at the header page and that at the page is no damage."""
    with DataStream.open(path) as stream:
        pages = stream.parts.pages.for_server()
        known, updated = pages._end_sum, []

        def slow() -> Any:
            assert known is not None
            found = known()
            if not updated:
                updated.append(stream.update_entry(TAIL, 1, b"q" * SIZE))
            return found

        monkeypatch.setattr(pages, "_end_sum", slow)
        assert pages.verify_last_page()
        assert updated
        assert not pages.is_due(PAGES)
        assert stream.entry(TAIL).data == b"q" * SIZE


def forge(path: Path, pages: range, **fields: Any) -> None:
    """Write other values in the records of these pages."""
    sums = Path(f"{path}.sums")
    content = bytearray(sums.read_bytes())
    stream_id = SumsHeader.unpack(bytes(content[:HEADER_SIZE])).stream_id  # type: ignore[union-attr]
    for page in pages:
        start = RECORDS_OFFSET + page * RECORD_SIZE
        record = PageSum.unpack(bytes(content[start : start + RECORD_SIZE]), page, stream_id)
        assert record is not None
        content[start : start + RECORD_SIZE] = record._replace(**fields).pack(page, stream_id)
    sums.write_bytes(content)


def test_a_record_with_another_end(path: Path) -> None:
    """The chain proves the hash alone: a page that has it is right."""
    forge(path, range(BAD, BAD + 1), end=100)
    evict(path)
    with DataStream.open(path, read_only=True) as reader:
        assert is_good(reader, FIRST_BAD)
    flip(path, BAD)
    with DataStream.open(path, read_only=True) as reader, pytest.raises(DamagedPage):
        is_good(reader, FIRST_BAD)


def test_a_restoration_makes_no_record_of_other_bytes(path: Path) -> None:
    """The last page becomes whole while a server is asked, and is damaged in another place."""
    with DataStream.open(path) as stream:
        owned, whole = stream._ensure_writable().owned, path.read_bytes()
        flip(path, PAGES, in_memory=True)

        class Peer:
            name = "peer:1"
            only_proven = False

            def header(self) -> Any:
                return stream.header

            def stream_id(self) -> bytes:
                return stream.stream_id

            def entries(self, first: int, stop: int, most: int) -> bytes:
                while owned.end.sums.page == PAGES:
                    append(stream, (1, b"m" * SIZE))
                flip(path, PAGES, at=500_000, in_memory=True)
                return Model(whole).packed(first, stop)

            def close(self) -> None:
                pass

        stream.parts.pages.heal(PAGES, [Peer()])
        assert owned.sums.get(PAGES) is not None
        pages = stream.parts.pages.for_server()
        pages.suspect([PAGES])
        with pytest.raises(DamagedPage):
            pages.compare([PAGES])
