"""One bit of what is committed is changed: every check names the page and the entries."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from datastreamer import DataStream
from datastreamer.errors import DamagedEntry, DamagedPage, StreamFileError
from datastreamer.storage.maintain.check import verify
from tests.storage.made import FIRST, PAGE, header_of, scan_file


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Some pages of small entries and bookmarks, and a last page that is not whole."""
    path = tmp_path_factory.mktemp("flips") / "s.bin"
    source = random.Random(7)
    with DataStream.create(path, system_id=9, sync="os") as stream:
        while stream.header.total_length < FIRST + 2 * PAGE + PAGE // 3:
            with stream.atomic_op() as op:
                op.add_bookmark(stream.total_entries.to_bytes(8, "big"))
                for _ in range(40):
                    op.add_entry(source.randrange(5), source.randbytes(source.randrange(900)))
    return path


def flips(path: Path, count: int, seed: int) -> Iterator[tuple[int, int]]:
    """Positions of single bits of the committed bytes, the file's header among them, and not the
    bytes after a padding mark."""
    source, end = random.Random(seed), header_of(path)[-2]
    stops: dict[int, int] = {}
    for entry in scan_file(path):
        stops[(entry.offset - FIRST) // PAGE] = entry.offset + 17 + len(entry.data)
    for at in range(count):
        offset = source.randrange(54) if at % 100 == 0 else source.randrange(FIRST, end)
        if offset >= FIRST:
            offset = min(offset, stops[(offset - FIRST) // PAGE])
        yield min(offset, end - 1), source.randrange(8)


def entries_at(path: Path, page: int) -> tuple[int, int]:
    """The first entry of a page, and the one after its last."""
    start = FIRST + page * PAGE
    numbers = [e.number for e in scan_file(path) if start <= e.offset < start + PAGE]
    return numbers[0], numbers[-1] + 1


@pytest.mark.parametrize("count", [100, pytest.param(10_000, marks=pytest.mark.soak)])
def test_verify_notices_every_one(whole: Path, tmp_path: Path, count: int) -> None:
    content = whole.read_bytes()
    path = tmp_path / "s.bin"
    path.with_name("s.bin.sums").write_bytes(whole.with_name("s.bin.sums").read_bytes())
    named = [entries_at(whole, page) for page in range(3)]
    path.write_bytes(content)
    assert verify(path).ok
    for offset, bit in flips(whole, count, seed=1):
        with path.open("r+b") as file:
            file.seek(offset)
            file.write(bytes([content[offset] ^ 1 << bit]))
            file.flush()
            report = verify(path)
            assert not report.ok, (offset, bit)
            if offset >= FIRST:
                page = (offset - FIRST) // PAGE
                first, end = named[page]
                places = [int(p.where.split()[-1]) for p in report.problems if "byte" in p.where]
                assert any(FIRST + page * PAGE <= at <= FIRST + (page + 1) * PAGE for at in places)
                entries = f"entries {first} to {end - 1}"
                assert any(entries in it.what for it in report.problems), report.problems
            file.seek(offset)
            file.write(bytes([content[offset]]))
    assert verify(path).ok


@pytest.mark.parametrize("count", [100, pytest.param(10_000, marks=pytest.mark.soak)])
@pytest.mark.parametrize("follow", [False, True])
def test_a_reader_that_verifies_always_notices_every_one(
    whole: Path, tmp_path: Path, count: int, follow: bool
) -> None:
    content = whole.read_bytes()
    path = tmp_path / "s.bin"
    path.with_name("s.bin.sums").write_bytes(whole.with_name("s.bin.sums").read_bytes())
    path.write_bytes(content)
    total, named = header_of(whole)[-1], [entries_at(whole, page) for page in range(3)]
    for offset, bit in flips(whole, count, seed=2):
        with path.open("r+b") as file:
            file.seek(offset)
            file.write(bytes([content[offset] ^ 1 << bit]))
            file.flush()
            with (
                pytest.raises(StreamFileError) as failed,
                DataStream.open(
                    path, read_only=True, follow=follow, verify="always", index="memory"
                ) as stream,
            ):
                assert sum(len(batch) for batch in stream.batches()) == total
            if isinstance(failed.value, DamagedPage):
                page = (offset - FIRST) // PAGE
                assert failed.value.page == page
                assert (failed.value.first, failed.value.end) == named[page]
            file.seek(offset)
            file.write(bytes([content[offset]]))


def test_other_pages_can_be_read(whole: Path, tmp_path: Path) -> None:
    content = bytearray(whole.read_bytes())
    content[FIRST + PAGE + 5000] ^= 1
    path = tmp_path / "s.bin"
    path.write_bytes(content)
    path.with_name("s.bin.sums").write_bytes(whole.with_name("s.bin.sums").read_bytes())
    first, end = entries_at(whole, 1)
    with DataStream.open(path, read_only=True, verify="always") as stream:
        assert len([*stream.entries(0, first)]) == first
        assert len([*stream.entries(end)]) == stream.total_entries - end
        for _ in range(2):
            with pytest.raises(DamagedPage, match=rf"page 1 \(entries {first} to {end - 1}\)"):
                stream.entry(first + 3)
        with pytest.raises(DamagedEntry):
            list(stream.entries())
    with DataStream.open(path, read_only=True, verify="never") as stream:
        assert len([*stream.entries()]) == stream.total_entries


def test_a_writer_goes_on_after_a_damaged_last_page(
    whole: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    content = bytearray(whole.read_bytes())
    first, end = entries_at(whole, 2)
    content[FIRST + 2 * PAGE + 5000] ^= 1
    path = tmp_path / "s.bin"
    path.write_bytes(content)
    path.with_name("s.bin.sums").write_bytes(whole.with_name("s.bin.sums").read_bytes())
    for _ in range(2):
        with DataStream.open(path, index="memory", verify="always") as stream:
            assert stream.total_entries == end
        assert any("do not match their checksum" in it for it in caplog.messages)
    with DataStream.open(path, index="memory", verify="always") as stream:
        with stream.atomic_op() as op:
            op.add_entry(3, b"the first one of the next page")
        assert [e.data for e in stream.entries(end)] == [b"the first one of the next page"]
        assert stream.reader.cursor(end).offset == FIRST + 3 * PAGE
        with pytest.raises(DamagedPage):
            stream.entry(first)
    (problem,) = verify(path).problems
    assert f"page 2 (entries {first} to {end - 1})" in problem.what
    content = bytearray(path.read_bytes())
    content[FIRST + 2 * PAGE + 5000] ^= 1
    path.write_bytes(content)
    assert verify(path).ok  # the page has kept its checksum
