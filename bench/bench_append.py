"""Appending: per call, in bulk, and operation by operation, with and without a sync.

The limits are what the same bytes cost when they are written with nothing around:
two bare writes a commit (data, header), and one fdatasync after them.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import pytest

from bench.measure import Done
from datastreamer import DataStream
from datastreamer.format import HEADER_PAGE_SIZE, PAGE_SIZE

Versus = Callable[..., None]
SIZE = 200
# What a commit writes besides its data: header, record, slots and mark.
HEADER_BYTES = 1568
OPERATION = 5


@contextmanager
def new_stream(folder: Path, sync: Literal["commit", "os"] = "os") -> Iterator[DataStream]:
    path = folder / "ours.bin"
    try:
        with DataStream.create(path, sync=sync, index="memory") as stream:
            yield stream
    finally:
        for each in (path, path.with_name("ours.bin.pages"), path.with_name("ours.bin.sums")):
            each.unlink(missing_ok=True)


@contextmanager
def new_file(folder: Path, size: int) -> Iterator[int]:
    """A descriptor of an empty file with `size` bytes of room."""
    path = folder / "bare.bin"
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL)
    try:
        os.posix_fallocate(fd, 0, size)
        os.fsync(fd)
        yield fd
    finally:
        os.close(fd)
        path.unlink()


def bare_commits(
    folder: Path, operations: int, size: int, *, sync: bool, header: bool = True
) -> Done:
    """Two pwrites an operation from Python, and one fdatasync where `sync` is true.

    Without `header`, one pwrite: of the data alone.
    """
    data, head = bytes(size), bytes(HEADER_BYTES)
    with new_file(folder, HEADER_PAGE_SIZE + size * operations) as fd:
        offset = HEADER_PAGE_SIZE
        begin = time.perf_counter()
        for _ in range(operations):
            os.pwrite(fd, data, offset)
            if header:
                os.pwrite(fd, head, 16)
            if sync:
                os.fdatasync(fd)
            offset += size
        return Done(operations, time.perf_counter() - begin)


def bare_copy(folder: Path, size: int) -> float:
    """Seconds to write `size` bytes to where a stream has its pages, a page at a time."""
    page = bytes(PAGE_SIZE)
    with new_file(folder, HEADER_PAGE_SIZE + size + PAGE_SIZE) as fd:
        begin = time.perf_counter()
        for offset in range(HEADER_PAGE_SIZE, HEADER_PAGE_SIZE + size, PAGE_SIZE):
            os.pwrite(fd, page, offset)
        return time.perf_counter() - begin


def test_one_call_an_entry(versus: Versus, smoke: bool, tmp_path: Path) -> None:
    count = 2_000 if smoke else 500_000
    data = bytes(SIZE)

    def ours() -> Done:
        with new_stream(tmp_path) as stream:
            begin = time.perf_counter()
            with stream.atomic_op() as op:
                add = op.add_entry
                for _ in range(count):
                    add(1, data)
            return Done(count, time.perf_counter() - begin)

    versus(
        "append, one call an entry, 200 B, one operation, not synced",
        ours,
        {"bare pwrites of the bytes": lambda: Done(count, bare_copy(tmp_path, count * 217))},
        unit="entries/s",
    )


def test_in_bulk(versus: Versus, reference: Any, smoke: bool, tmp_path: Path) -> None:
    count = 2_000 if smoke else 500_000
    items = [bytes(SIZE)] * min(count, 10_000)

    def ours() -> Done:
        with new_stream(tmp_path) as stream:
            begin = time.perf_counter()
            with stream.atomic_op() as op:
                for _ in range(0, count, len(items)):
                    op.add_entries(1, items)
            return Done(count, time.perf_counter() - begin)

    versus(
        "append in bulk, 200 B, one operation, not synced",
        ours,
        {
            "reference (Go)": reference and (lambda: reference.append(1, count // 10)),
            "bare pwrites of the bytes": lambda: Done(count, bare_copy(tmp_path, count * 217)),
        },
        unit="entries/s",
        at_least={"reference (Go)": 5.0, "bare pwrites of the bytes": 0.7},
    )


@pytest.mark.parametrize("bookmarks", [False, True], ids=["plain", "bookmarks"])
def test_operations(
    versus: Versus, reference: Any, smoke: bool, tmp_path: Path, bookmarks: bool
) -> None:
    operations = 50 if smoke else 30_000
    data = bytes(SIZE)

    def ours() -> Done:
        with new_stream(tmp_path) as stream:
            begin = time.perf_counter()
            for number in range(operations):
                with stream.atomic_op() as op:
                    if bookmarks:
                        op.add_bookmark(number.to_bytes(8, "big"))
                    add = op.add_entry
                    for _ in range(OPERATION):
                        add(1, data)
            return Done(operations, time.perf_counter() - begin)

    def theirs() -> Done:
        _, seconds = reference.append(operations, OPERATION, SIZE, bookmarks=bookmarks)
        return Done(operations, seconds)

    size = OPERATION * (17 + SIZE) + (25 if bookmarks else 0)
    versus(
        f"append, operations of 5{' and a bookmark' if bookmarks else ''}, 200 B, not synced",
        ours,
        {
            "reference (Go)": reference and theirs,
            "two bare pwrites": lambda: bare_commits(tmp_path, operations, size, sync=False),
        },
        unit="operations/s",
        at_least=1.0,
    )


@pytest.mark.parametrize("bookmark", [False, True], ids=["plain", "bookmark"])
@pytest.mark.parametrize("entries", [1, OPERATION])
def test_append(
    versus: Versus, reference: Any, smoke: bool, tmp_path: Path, entries: int, bookmark: bool
) -> None:
    """`append` and `append_many`: an operation in one call."""
    operations = 50 if smoke else 50_000
    data = bytes(SIZE)
    items = [data] * entries

    def ours() -> Done:
        with new_stream(tmp_path) as stream:
            begin = time.perf_counter()
            for number in range(operations):
                key = number.to_bytes(8, "big") if bookmark else None
                if entries == 1:
                    stream.append(1, data, bookmark=key)
                else:
                    stream.append_many(1, items, bookmark=key)
            return Done(operations, time.perf_counter() - begin)

    def theirs() -> Done:
        _, seconds = reference.append(operations, entries, SIZE, bookmarks=bookmark)
        return Done(operations, seconds)

    size = entries * (17 + SIZE) + (25 if bookmark else 0)
    versus(
        f"append, one call an operation of {entries}{' and a bookmark' if bookmark else ''}, "
        "200 B, not synced",
        ours,
        {
            "reference (Go)": reference and theirs,
            "two bare pwrites": lambda: bare_commits(tmp_path, operations, size, sync=False),
        },
        unit="operations/s",
        at_least=1.3 if entries == 1 and not bookmark else 2.0,
    )


def test_times_and_counts(versus: Versus, smoke: bool, tmp_path: Path) -> None:
    """What `FILE.pages` costs a commit."""
    operations, data = 50 if smoke else 100_000, bytes(SIZE)

    def ours(*, without: bool = False) -> Done:
        with new_stream(tmp_path) as stream:
            if without:
                stream.parts.relay.leave_times()
                stream._ensure_writable().owned.summaries.close()
            begin = time.perf_counter()
            for _ in range(operations):
                stream.append(1, data)
            return Done(operations, time.perf_counter() - begin)

    versus(
        "append, one call an operation of 1, 200 B, not synced: with times and counts of pages",
        ours,
        {"without": lambda: ours(without=True)},
        unit="operations/s",
        at_least=0.99,
    )


@pytest.mark.parametrize("bookmark", [False, True], ids=["plain", "bookmark"])
def test_three_calls(
    versus: Versus, reference: Any, smoke: bool, tmp_path: Path, bookmark: bool
) -> None:
    """`start_atomic_op`, `add_entry` and `commit_atomic_op`: what a port of the reference calls."""
    operations = 50 if smoke else 50_000
    data = bytes(SIZE)

    def ours() -> Done:
        with new_stream(tmp_path) as stream:
            start, mark, add = stream.start_atomic_op, stream.add_bookmark, stream.add_entry
            commit = stream.commit_atomic_op
            begin = time.perf_counter()
            for number in range(operations):
                start()
                if bookmark:
                    mark(number.to_bytes(8, "big"))
                add(1, data)
                commit()
            return Done(operations, time.perf_counter() - begin)

    def theirs() -> Done:
        _, seconds = reference.append(operations, 1, SIZE, bookmarks=bookmark)
        return Done(operations, seconds)

    size = 17 + SIZE + (25 if bookmark else 0)
    versus(
        f"append, {'four' if bookmark else 'three'} calls an operation of 1"
        f"{' and a bookmark' if bookmark else ''}, 200 B, not synced",
        ours,
        {
            "reference (Go)": reference and theirs,
            "two bare pwrites": lambda: bare_commits(tmp_path, operations, size, sync=False),
        },
        unit="operations/s",
        at_least=1.0,
    )


def test_operations_synced(versus: Versus, smoke: bool, tmp_path: Path) -> None:
    operations = 5 if smoke else 2_000
    data = bytes(SIZE)

    def ours() -> Done:
        with new_stream(tmp_path, "commit") as stream:
            begin = time.perf_counter()
            for _ in range(operations):
                with stream.atomic_op() as op:
                    add = op.add_entry
                    for _ in range(OPERATION):
                        add(1, data)
            return Done(operations, time.perf_counter() - begin)

    size = OPERATION * (17 + SIZE)
    versus(
        "append, operations of 5, 200 B, each on disk",
        ours,
        {
            "one pwrite, one fdatasync": (
                lambda: bare_commits(tmp_path, operations, size, sync=True, header=False)
            ),
            "two pwrites, one fdatasync": (
                lambda: bare_commits(tmp_path, operations, size, sync=True)
            ),
        },
        unit="operations/s",
        at_least={"one pwrite, one fdatasync": 0.8},
    )


def test_operations_that_share_syncs(versus: Versus, smoke: bool, tmp_path: Path) -> None:
    operations = 50 if smoke else 20_000
    items = [bytes(SIZE)] * OPERATION

    def ours() -> Done:
        with new_stream(tmp_path, "commit") as stream:
            begin = time.perf_counter()
            for _ in range(operations):
                stream.start_atomic_op()
                stream.add_entries(1, items)
                stream.commit_atomic_op(wait=False)
            stream.sync()
            return Done(operations, time.perf_counter() - begin)

    size = OPERATION * (17 + SIZE)
    versus(
        "append, operations of 5, 200 B, none waits, all on disk at the end",
        ours,
        {
            "promised": 1e5,
            "two bare pwrites": lambda: bare_commits(tmp_path, operations, size, sync=False),
            "each waits: one pwrite, one fdatasync": (
                lambda: bare_commits(tmp_path, operations, size, sync=True, header=False)
            ),
        },
        unit="operations/s",
        at_least=1.0,
    )
