"""Faults of the store at each operation: what is archived stays a valid prefix, and the next
publication completes."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from datastreamer.archive.check import check
from datastreamer.archive.restore import restore
from datastreamer.errors import ArchiveError
from datastreamer.storage.objects.opened import MANIFESTS, OpenArchive
from datastreamer.storage.stream import DataStream
from tests.archive.stores import Killed, MemoryStore, ensure_whole, fill, opened, push

FAULTS = (
    *("timeout", "lost", "409", "412", "403", "404", "500", "short", "changed"),
    *("killed before", "killed after"),
)
# More of them in the long tests.
ROUNDS = int(os.environ.get("ARCHIVE_ROUNDS", "12"))


def _begin(stream: DataStream) -> None:
    fill(stream, 1.3, seed=1)


def _append(stream: DataStream) -> None:
    fill(stream, 5, seed=2)


def _update(stream: DataStream) -> None:
    number = next(e.number for e in stream.entries(3) if e.type == 2)
    stream.update_entry(number, 2, bytes(len(stream.entry(number).data)))


def _truncate(stream: DataStream) -> None:
    stream.truncate(stream.total_entries // 3)
    fill(stream, 0.5, seed=3)


STEPS: dict[str, Callable[[DataStream], None]] = {
    "first": _begin,
    "append": _append,
    "update": _update,
    "truncation": _truncate,
}


def copies(memory: MemoryStore) -> MemoryStore:
    made = MemoryStore()
    made.objects = dict(memory.objects)
    return made


@pytest.fixture(scope="module")
def histories(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[str, Path, MemoryStore]]:
    """Of each step: the stream after it, and the archive before it."""
    folder = tmp_path_factory.mktemp("streams")
    path, memory, found = folder / "s.bin", MemoryStore(), []
    for name, step in STEPS.items():
        with DataStream.open_or_create(path) as stream:
            step(stream)
        kept = folder / f"{name}.bin"
        shutil.copy(path, kept)
        shutil.copy(f"{path}.sums", f"{kept}.sums")
        found.append((name, kept, copies(memory)))
        push(kept, memory, pages=3)
    return found


def ensure_prefix(before: MemoryStore, after: MemoryStore, path: Path) -> None:
    """What is archived is the stream before the step, or after it."""
    names = [name for name in after.objects if name.startswith(MANIFESTS)]
    assert {name: after.objects[name] for name in before.objects} == before.objects
    if not names:
        return
    new = len(names) > sum(name.startswith(MANIFESTS) for name in before.objects)
    ensure_whole(after, path if new else None)


def attempted(memory: MemoryStore, path: Path) -> bool:
    """Whether a push claims to have succeeded."""
    with suppress(ArchiveError, Killed):
        push(path, memory, pages=3)
        return True
    return False


@pytest.mark.parametrize("share", [3, pytest.param(1, marks=pytest.mark.soak)])
def test_each_fault_at_each_operation(
    histories: list[tuple[str, Path, MemoryStore]], share: int
) -> None:
    """All of them in the soak tests; here each operation has some of the faults in one step, and
    the others in the other steps."""
    count = 0
    for step, (_, path, before) in enumerate(histories):
        plain = copies(before)
        push(path, plain, pages=3)
        for at in range(len(plain.operations)):
            for fault in FAULTS[(step + at) % share :: share]:
                memory = copies(before)
                memory.fault = lambda *_, m=memory, at=at, fault=fault: (
                    fault if len(m.operations) == at + 1 else ""
                )
                done = attempted(memory, path)
                memory.fault = lambda *_: ""
                ensure_prefix(before, memory, path)
                push(path, memory, pages=3)
                ensure_whole(memory, path)
                newest = opened(memory).newest()[0]
                number = opened(plain).newest()[0].number
                # Only a writer that knows of no success publishes again.
                assert newest.number == number or (not done and newest.number == number + 1)
                count += 1
    assert count > 300 // share


def test_random_faults(histories: list[tuple[str, Path, MemoryStore]], tmp_path: Path) -> None:
    """Several faults in one publication, and several writers after each other."""
    for seed in range(ROUNDS):
        chosen = random.Random(seed)
        memory = MemoryStore()
        for _, path, _ in histories:
            before = copies(memory)
            memory.fault = lambda *_, chosen=chosen: (
                chosen.choice(FAULTS) if chosen.random() < 0.15 else ""
            )
            for _ in range(chosen.randrange(1, 4)):
                attempted(memory, path)
            memory.fault = lambda *_: ""
            ensure_prefix(before, memory, path)
            push(path, memory, pages=3)
            ensure_whole(memory, path)


def test_restores_under_faults(
    histories: list[tuple[str, Path, MemoryStore]], tmp_path: Path
) -> None:
    """A file is there whole, or not at all; the next restore completes it."""
    memory, out = histories[-1][2], tmp_path / "out.bin"
    with DataStream.open(histories[-2][1], read_only=True) as stream:
        expected = [batch.packed() for batch in stream.batches()]
    for fault in ("timeout", "403", "404", "short", "changed", "killed before"):
        for at in range(12):
            memory.operations.clear()
            memory.fault = lambda *_, at=at, fault=fault: (
                fault if len(memory.operations) == at + 1 else ""
            )
            with suppress(ArchiveError, Killed):
                restore(opened(memory), out, opened(memory).newest()[0])
            memory.fault = lambda *_: ""
            if not out.exists():
                restore(opened(memory), out, opened(memory).newest()[0])
            with DataStream.open(out, read_only=True, verify="always") as made:
                assert [batch.packed() for batch in made.batches()] == expected
            for each in tmp_path.iterdir():
                shutil.rmtree(each) if each.is_dir() else each.unlink()


@pytest.mark.parametrize("what", ["push", "restore"])
def test_killed_processes(what: str, tmp_path: Path) -> None:
    """A process that is killed at any moment leaves a valid archive, or no file."""
    path, url = tmp_path / "s.bin", (tmp_path / "archive").as_uri()
    with DataStream.create(path, sync="os") as stream:
        fill(stream, 40, seed=4)
    program = [sys.executable, "-m", "datastreamer", "archive"]
    if what == "restore":
        subprocess.run([*program, "push", str(path), url], check=True)
    arguments = ["push", str(path), url] if what == "push" else ["restore", url, "r.bin"]
    for seed in range(6):
        process = subprocess.Popen([*program, *arguments], cwd=tmp_path)
        folder = tmp_path / "archive" / "s" if what == "push" else tmp_path
        until = time.monotonic() + 60
        # Some work is done when it is killed, a little more each time.
        while process.poll() is None and time.monotonic() < until:
            if folder.exists() and len(list(folder.iterdir())) > 1:
                time.sleep(0.02 * seed)
                break
            time.sleep(0.001)
        process.kill()
        process.wait()
    subprocess.run([*program, *arguments], cwd=tmp_path, check=True)
    assert check(OpenArchive.open(url)).problems == []
    if what == "restore":
        with DataStream.open(tmp_path / "r.bin", read_only=True, verify="always") as made:
            assert made.total_entries == stream.total_entries
