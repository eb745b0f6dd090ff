"""One bit of a stream file is changed: no task makes a row of that page, and the error names it."""

from __future__ import annotations

import contextlib
import pickle
import random
import threading
from pathlib import Path
from typing import Any

import pytest

from datastreamer import DataStream
from datastreamer.errors import DamagedPage, StreamFileError, UnknownBookmark
from datastreamer.spark.read.files import FileSnapshot, Lost, read_pages, take_snapshot
from datastreamer.spark.read.paths import FileLocation
from datastreamer.storage.write.opening import make_sums
from datastreamer.zkevm import encode, events
from tests.conftest import Golden
from tests.spark.read.reading import Query
from tests.spark.stream.following import Driver
from tests.storage.made import FIRST, PAGE, add, make, scan_file
from tests.storage.pages.test_flips import entries_at, flips

SIZE = 300_000
"""Three entries of this size in a page."""


def of_three_a_page(number: int) -> tuple[int, bytes]:
    return 1, number.to_bytes(4, "big") * (SIZE // 4)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Four whole pages, and a last one with two entries."""
    return make(tmp_path / "s.bin", *[[of_three_a_page(number)] for number in range(14)])


def flip(path: Path, offset: int, bit: int = 0) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        (byte,) = file.read(1)
        file.seek(offset)
        file.write(bytes([byte ^ 1 << bit]))


def snapshot_of(path: Path) -> FileSnapshot:
    taken: FileSnapshot = pickle.loads(
        pickle.dumps(take_snapshot(FileLocation(str(path)), stream_type=1))
    )
    return taken


def found_in(snapshot: FileSnapshot, *, step: int) -> tuple[list[int], list[Lost]]:
    """The numbers of the entries in all parts of so many pages, and what is lost."""
    numbers: list[int] = []
    lost: list[Lost] = []
    for first in range(0, snapshot.pages, step):
        for run in read_pages(snapshot, first, min(first + step, snapshot.pages)):
            if isinstance(run, Lost):
                lost.append(run)
            else:
                numbers += run.batch.numbers
    return numbers, lost


@pytest.mark.parametrize("step", [1, 2, 5])
@pytest.mark.parametrize("count", [80, pytest.param(10_000, marks=pytest.mark.soak)])
def test_every_flipped_bit_is_noticed(path: Path, count: int, step: int) -> None:
    named = [entries_at(path, page) for page in range(5)]
    everything = list(range(14))
    assert found_in(snapshot_of(path), step=step) == (everything, [])
    for offset, bit in flips(path, count, seed=step):
        flip(path, offset, bit)
        if offset < FIRST:
            with pytest.raises(StreamFileError):
                snapshot_of(path)
        else:
            page = (offset - FIRST) // PAGE
            first, end = named[page]
            numbers, (lost,) = found_in(snapshot_of(path), step=step)
            assert numbers == [*range(first), *range(end, 14)]
            assert isinstance(lost.error, DamagedPage)
            assert lost.error.path == str(path)
            assert (lost.error.page, lost.first, lost.next) == (page, first, end)
        flip(path, offset, bit)
    assert found_in(snapshot_of(path), step=step) == (everything, [])


@pytest.mark.parametrize("page", [0, 2, 4])
def test_the_modes(path: Path, page: int) -> None:
    first, end = entries_at(path, page)
    flip(path, FIRST + page * PAGE + 2000)
    what = rf"page {page} \(entries {first} to {end - 1}\): the entries do not match"
    query = Query(path=path, partitionBytes="1m")
    rows: list[int] = []

    def read() -> None:
        for at in range(len(query.parts)):
            rows.extend(n for it in query.part(at) for n in it.column("number").to_pylist())

    with pytest.raises(DamagedPage, match=what):
        read()
    assert rows == list(range(first))
    whole = [*range(first), *range(end, 14)]
    dropped = Query(path=path, mode="DROPMALFORMED", partitionBytes="1m")
    assert [row["number"] for row in dropped.rows()] == whole
    permissive = Query(path=path, mode="PERMISSIVE", partitionBytes="1m").rows()
    assert [row["number"] for row in permissive] == [*range(first + 1), *range(end, 14)]
    (bad,) = [row for row in permissive if row["error"] is not None]
    assert bad["number"] == first
    assert bad["error"].endswith(f"entries {first} to {end - 1} cannot be read")
    # A query that does not need the page is not affected.
    after = Query(path=path, startingOffset=end % 14, endingOffset=14 if page < 4 else 11)
    assert [row["number"] for row in after.rows()] == [*range(end % 14, 14 if page < 4 else 11)]
    # And who switches it off gets what the file holds.
    assert [row["number"] for row in Query(path=path, verify=False).rows()] == list(range(14))


def test_the_plan_is_made_of_verified_pages(tmp_path: Path) -> None:
    """A changed bit in a bookmark makes it that of another block."""
    entries = []
    for number in range(64):
        entries.append((0xB0, encode(events.BookMark(2, number), version=3)[1]))
        entries.append(encode(events.L2Block(number, 1, block_info_root=bytes(99_000)), version=3))
    path = make(tmp_path / "s.bin", *[[entry] for entry in entries], version=3)
    at = next(entry for entry in scan_file(path) if entry.number == 60)
    assert at.data == encode(events.BookMark(2, 30), version=3)[1]
    flip(path, at.offset + 17 + len(at.data) - 1)
    options = {"path": path, "table": "blocks", "startingOffset": "block:30"}
    with pytest.raises(UnknownBookmark):
        Query(**options, verify=False)
    with pytest.raises(DamagedPage, match=r"page 2 \(entries 41 to 60\)"):
        Query(**options)
    with pytest.raises(DamagedPage):
        Driver(**options).batch()


# What is not compared is not damaged.


def damaged_in(path: Path) -> list[int]:
    numbers, lost = found_in(snapshot_of(path), step=2)
    assert len(numbers) + sum(it.error.end - it.error.first for it in lost) == 14  # type: ignore[attr-defined]
    return [it.error.page for it in lost]  # type: ignore[attr-defined]


def test_without_records(path: Path) -> None:
    sums = path.with_name("s.bin.sums")
    content = sums.read_bytes()
    for page in (1, 3, 4):
        flip(path, FIRST + page * PAGE + 2000)
    assert damaged_in(path) == [1, 3, 4]
    torn = bytearray(content)
    torn[512 + 64 + 5] ^= 1
    sums.write_bytes(torn)
    assert damaged_in(path) == [3, 4]
    # A damaged page without a record breaks the link: nothing proves the records before it.
    sums.write_bytes(content[: 512 + 2 * 64])
    assert damaged_in(path) == [4]
    flip(path, FIRST + 3 * PAGE + 2000)
    assert damaged_in(path) == [1, 4]
    flip(path, FIRST + 3 * PAGE + 2000)
    other = make(path.with_name("o.bin"), *[[of_three_a_page(number)] for number in range(14)])
    sums.write_bytes(other.with_name("o.bin.sums").read_bytes())
    assert damaged_in(path) == [4]
    sums.unlink()
    sums.symlink_to(other.with_name("o.bin.sums"))
    assert damaged_in(path) == [4]
    sums.unlink()
    assert damaged_in(path) == [4]


def test_the_entries_of_a_page_after_one_without_a_record(path: Path) -> None:
    sums = path.with_name("s.bin.sums")
    content = bytearray(sums.read_bytes())
    content[512 + 64 : 512 + 128] = bytes(64)
    sums.write_bytes(content)
    flip(path, FIRST + 2 * PAGE + 2000)
    for step in (1, 2, 3):
        _, (lost,) = found_in(snapshot_of(path), step=step)
        assert (lost.first, lost.next) == entries_at(path, 2)


def test_a_program_without_checksums_wrote_last(path: Path) -> None:
    flip(path, FIRST + PAGE + 2000)
    flip(path, FIRST + 4 * PAGE + 2000)
    flip(path, 100)  # the commit record does not fit the header any more
    assert damaged_in(path) == []


def test_a_stream_by_a_link(path: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    link = tmp_path / "elsewhere" / "link.bin"
    link.symlink_to(path)
    flip(path, FIRST + PAGE + 2000)
    assert damaged_in(link) == [1]


# Beside a writer.


def test_a_change_since_the_plan_is_not_called_damage(path: Path) -> None:
    with DataStream.open(path, index="memory") as stream:
        planned = snapshot_of(path)
        stream.update_entry(4, 1, b"new " * (SIZE // 4))
        with pytest.raises(StreamFileError, match="changed since this query was planned") as error:
            found_in(planned, step=2)
        assert not isinstance(error.value, DamagedPage)
        assert found_in(snapshot_of(path), step=2) == (list(range(14)), [])


def test_entries_that_were_appended_since_the_plan(path: Path) -> None:
    """The end of the plan is inside a page that has its own checksum now, and other entries."""
    with DataStream.open(path, index="memory") as stream:
        planned = snapshot_of(path)
        add(stream, *[[of_three_a_page(number)] for number in range(14, 20)])
        assert found_in(planned, step=2) == (list(range(14)), [])
        flip(path, FIRST + 4 * PAGE + 2000)
        _, (lost,) = found_in(planned, step=2)
        assert (lost.first, lost.next) == (12, 14)


@pytest.mark.parametrize("sync", ["commit", "os"])
def test_a_followed_stream_has_no_false_damage(path: Path, sync: Any) -> None:
    """Beside truncations and updates: every batch is right, or was changed since it was planned."""
    done = threading.Event()

    def write() -> None:
        source = random.Random(3)
        with DataStream.open(path, index="memory", sync=sync) as stream:
            while not done.is_set():
                add(stream, [of_three_a_page(stream.total_entries)] * source.randrange(1, 4))
                number = source.randrange(stream.total_entries)
                if source.random() < 0.5:
                    stream.update_entry(number, 1, source.randbytes(4) * (SIZE // 4))
                elif source.random() < 0.2 and stream.total_entries > 40:
                    stream.truncate(max(14, number))
                # A stream that changes all the time cannot be read.
                done.wait(0.1 if source.random() < 0.1 else 0.002)

    writer = threading.Thread(target=write)
    writer.start()
    read, errors = 0, []
    try:
        for turn in range(300):
            if turn >= 60 and read:
                break
            driver = Driver(path=path, failOnDataLoss=False, maxEntriesPerTrigger=9)
            try:
                read += sum(map(len, driver.batches()[:4]))
            except StreamFileError as error:
                errors.append(error)
    finally:
        done.set()
        writer.join()
        Driver.stop_all()
    assert read
    assert not [error for error in errors if isinstance(error, DamagedPage)]


def test_damage_in_a_followed_stream(path: Path) -> None:
    with DataStream.open(path, index="memory") as stream:
        driver = Driver(path=path)
        assert driver.numbers() == list(range(14))
        add(stream, *[[of_three_a_page(number)] for number in range(14, 20)])
        flip(path, FIRST + 5 * PAGE + 2000)
        with pytest.raises(DamagedPage, match=r"page 5 \(entries 15 to 17\)"):
            driver.numbers()
        Driver.stop_all()


# Undamaged files.


def test_the_real_stream(tmp_path: Path, real_stream: Path) -> None:
    """Without checksums, and with them."""
    path = tmp_path / "real.bin"
    path.write_bytes(real_stream.read_bytes())
    without = found_in(snapshot_of(path), step=3)
    assert without == (list(range(34_723)), [])
    make_sums(path)
    assert found_in(snapshot_of(path), step=3) == without


def test_files_of_the_reference(golden: Golden) -> None:
    for name in golden.names():
        path = golden.unpack(name)
        try:
            before = found_in(snapshot_of(path), step=1)
        except StreamFileError:
            continue
        with contextlib.suppress(StreamFileError):  # one that needs a repair
            make_sums(path)
        after = found_in(snapshot_of(path), step=1)
        assert (after[0], [str(it.error) for it in after[1]]) == (
            before[0],
            [str(it.error) for it in before[1]],
        )
