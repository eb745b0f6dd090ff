"""How far a stream goes: the largest entries, operations and offsets."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from xxhash import xxh3_128_digest

from datastreamer import DataStream
from datastreamer.errors import EntryTooLarge, WriteFailed
from datastreamer.format import HEADER_PAGE_SIZE, MAX_DATA_SIZE, PAGE_SIZE, Header, page_start
from datastreamer.storage.disk.file_ops import boot_id
from datastreamer.storage.header import records
from datastreamer.storage.header.records import CommitRecord, Head
from datastreamer.storage.pages.hashes import EndSum
from tests.oracle import pack
from tests.storage.made import items

ROOT = Path(__file__).resolve().parents[2]


def test_the_smallest_and_the_largest_entry(tmp_path: Path) -> None:
    path = tmp_path / "s.bin"
    largest = b"\xa5" * MAX_DATA_SIZE
    with DataStream.create(path, index="memory") as stream:
        with stream.atomic_op() as op:
            op.add_entry(1, b"")
            op.add_entry(2, largest)
            op.add_entry(3, b"")
            with pytest.raises(EntryTooLarge):
                op.add_entry(4, largest + b"\0")
        assert items(stream) == [(1, b""), (2, largest), (3, b"")]
        assert stream.header.total_length == page_start(2) + 17
    with DataStream.open(path, read_only=True) as stream:
        assert items(stream) == [(1, b""), (2, largest), (3, b"")]


HUGE = """
import re, sys
from datastreamer import DataStream

def peak():
    # In KiB. (getrusage includes, in a new process, its parent's.)
    return int(re.findall(r"VmHWM:\\s*(\\d+)", open("/proc/self/status").read())[0])

count = int(sys.argv[2])
data = [b"12345678"] * 10_000
with DataStream.create(sys.argv[1], sync="os", index="memory") as stream:
    before = peak()
    with stream.atomic_op() as op:
        for _ in range(count // len(data)):
            op.add_entries(1, data)
        assert stream.total_entries == 0
    print(peak() - before)
    assert stream.total_entries == count
    assert stream.entry(count - 1).data == data[0]
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the peak of memory is not known")
@pytest.mark.parametrize("count", [1_000_000, pytest.param(10_000_000, marks=pytest.mark.soak)])
def test_a_huge_operation_takes_bounded_memory(tmp_path: Path, count: int) -> None:
    found = subprocess.run(
        [sys.executable, "-c", HUGE, str(tmp_path / "s.bin"), str(count)],
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=True,
    )
    assert int(found.stdout) < 32 * 1024  # KiB; its bytes are 25 a entry


def far(path: Path, page: int, number: int) -> None:
    """A stream whose last page is `page`, beginning with entry `number`; the rest is a hole."""
    last = [pack(number, 1, b"far"), pack(number + 1, 2, b"away")]
    head = Head(page_start(page) + sum(map(len, last)), number + 2)
    content = records.new_page(Header(1, 1101, 1, *head))
    end_sum = EndSum(bytes(16), page, xxh3_128_digest(b"".join(last)))
    record = CommitRecord(b"a stream far out", 0, boot_id(), *[head] * 3, *[end_sum] * 3)
    records.put_record(content, record)
    records.put_mark(content, 0, head)
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL)
    try:
        os.ftruncate(fd, HEADER_PAGE_SIZE + (page + 1) * PAGE_SIZE)
        os.pwrite(fd, content, 0)
        # Where a binary search for the last pages looks.
        for high in (page, page + 1, page + 2):
            low = 0
            while high - low > 1:
                low = (low + high) // 2
                if low < page:
                    os.pwrite(fd, pack(low, 1, b"a page"), page_start(low))
        os.pwrite(fd, pack(0, 1, b"first"), page_start(0))
        os.pwrite(fd, pack(number - 5, 1, b"page before"), page_start(page - 1))
        os.pwrite(fd, b"".join(last), page_start(page))
    except OSError as error:
        pytest.skip(f"this file system has no such offsets: {error}")
    finally:
        os.close(fd)


@pytest.mark.parametrize(
    ("page", "number"),
    [
        ((4 << 10) - 1, 100_000_000),  # from below 4 GiB to above
        (80 << 10, (1 << 32) - 2),  # numbers past 32 bits
        ((16 << 20) - 6, 1 << 39),  # just below 16 TiB
    ],
)
def test_far_out(tmp_path: Path, page: int, number: int) -> None:
    path = tmp_path / "s.bin"
    far(path, page, number)
    with DataStream.open(path, index="memory") as stream:
        assert stream.total_entries == number + 2
        assert stream.entry(number).data == b"far"
        assert stream.entry(number + 1).data == b"away"
        with stream.atomic_op() as op:
            assert op.add_entry(3, bytes(MAX_DATA_SIZE)) == number + 2
            assert op.add_entry(4, b"next page") == number + 3
        assert [e.data[:9] for e in stream.entries(number)] == [
            b"far",
            b"away",
            bytes(9),
            b"next page",
        ]
        assert stream.header.total_length == page_start(page + 2) + 17 + 9
        stream.update_entry(number + 3, 4, b"NEXT PAGE")
        stream.truncate(number + 3)
        with stream.atomic_op() as op:
            assert op.add_entry(5, b"again") == number + 3
    with DataStream.open(path, follow=True, index="memory") as stream:
        assert stream.entry(number + 3).data == b"again"
        assert stream.total_entries == number + 4


def test_the_end_of_the_file_system(tmp_path: Path) -> None:
    """Where a file cannot grow any more, that is an error like a full disk."""
    path = tmp_path / "s.bin"
    far(path, (16 << 20) - 4, 1 << 39)
    with DataStream.open(path, index="memory") as stream:
        total = stream.total_entries
        stream.start_atomic_op()
        try:
            for _ in range(6):
                stream.add_entry(1, bytes(MAX_DATA_SIZE))
            stream.commit_atomic_op()
        except WriteFailed as error:
            said = str(error)
        else:
            said = ""
        if said:
            assert "File too large" in said or "No space" in said
            assert stream.total_entries == total
            stream.rollback_atomic_op()
            with stream.atomic_op() as op:
                op.add_entry(1, b"fits")
            assert stream.entry(total).data == b"fits"
        else:
            pytest.skip("this file system allows more than 16 TiB")
