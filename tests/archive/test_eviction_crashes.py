"""Kills and power cuts at each step of an eviction, and of what brings pages back."""

from __future__ import annotations

import random
import shutil
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from datastreamer import DataStream
from datastreamer.format import HEADER_PAGE_SIZE
from datastreamer.storage.maintain.check import verify
from datastreamer.storage.read import open_file
from datastreamer.storage.read.evicted import PagedFile
from tests.archive.evicting import Fields, everything, evict, made, marked_copy

SECTOR = 512


class Step(NamedTuple):
    """One write, hole (no data) or change of the size, or a sync (no span)."""

    offset: int
    size: int
    data: bytes | None
    sums: bytes


class Recorder:
    """What one writer does to its file, and the state of the stream after each of its calls."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.begin = path.read_bytes()
        self.steps: list[Step] = []
        self.states: list[tuple[int, list[Fields]]] = []

    def note(self, offset: int, size: int, data: bytes | None = None) -> None:
        sums = self.path.with_name(self.path.name + ".sums")
        self.steps.append(Step(offset, size, data, sums.read_bytes() if sums.exists() else b""))

    def state(self, stream: DataStream) -> None:
        self.states.append((len(self.steps), everything(stream)))

    def file(self) -> type[PagedFile]:
        recorder = self

        class Recorded(PagedFile):
            def write(self, data: Any, offset: int) -> None:
                super().write(data, offset)
                recorder.note(offset, len(data), bytes(data))

            def commit(self, packer: Any, page: Any, before: Any, after: Any, *rest: Any) -> None:
                # As one step: what a commit leaves is tested elsewhere.
                start = self.size()
                super().commit(packer, page, before, after, *rest)
                content = recorder.path.read_bytes()
                assert self.size() == start
                for each in (slice(HEADER_PAGE_SIZE, None), slice(0, HEADER_PAGE_SIZE)):
                    recorder.note(each.start or 0, len(content[each]), content[each])
                recorder.note(0, 0)

            def resize(self, size: int) -> None:
                super().resize(size)
                recorder.note(size, -1)

            def punch(self, start: int, stop: int) -> None:
                super().punch(start, stop)
                recorder.note(start, stop - start)

            def sync(self) -> None:
                super().sync()
                recorder.note(0, 0)

        return Recorded

    def images(self, choose: random.Random, at: int, power: bool) -> bytes:
        """The file if the process is killed before step `at`, or the power fails then."""
        image = bytearray(self.begin)
        syncs = [k for k in range(at) if self.steps[k].size == 0]
        sure = syncs[-1] if syncs else 0
        for k, (offset, size, data, _) in enumerate(self.steps[:at]):
            if size == -1:
                image[offset:] = b""
                image.extend(bytes(offset - len(image)))
                continue
            for start in range(0, size, SECTOR):
                if k >= sure and power and choose.random() < 0.5:
                    continue
                part = slice(offset + start, min(offset + start + SECTOR, offset + size))
                image[part] = (
                    bytes(part.stop - part.start) if data is None else data[start : start + SECTOR]
                )
        return bytes(image)


def work(recorder: Recorder, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(open_file, "PagedFile", recorder.file())
    with DataStream.open(recorder.path, index="memory") as stream:
        recorder.state(stream)
        evict(stream, url, 1)
        recorder.state(stream)
        evict(stream, url, 3)
        recorder.state(stream)
        stream.truncate(60)  # in page 1
        recorder.state(stream)
        stream.append(2, b"more" * 100)
        recorder.state(stream)
        stream.parts.pages.bring_back(0)
        recorder.state(stream)
    monkeypatch.undo()


@pytest.mark.parametrize("rounds", [60, pytest.param(4000, marks=pytest.mark.soak)])
def test_nothing_is_lost(rounds: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    twin, url = made(tmp_path / "twin.bin", 4), (tmp_path / "archive").as_uri()
    path = marked_copy(twin, tmp_path / "s.bin", url)
    recorder = Recorder(path)
    work(recorder, url, monkeypatch)
    image = tmp_path / "image.bin"
    choose = random.Random(rounds)
    for round_ in range(rounds):
        at, power = choose.randrange(len(recorder.steps) + 1), round_ % 2 == 0
        for old in tmp_path.glob("image.bin*"):
            shutil.rmtree(old) if old.is_dir() else old.unlink()
        image.write_bytes(recorder.images(choose, at, power))
        if at:
            image.with_name("image.bin.sums").write_bytes(recorder.steps[at - 1].sums)
        before = [state for steps, state in recorder.states if steps <= at][-1:]
        after = [state for steps, state in recorder.states if steps >= at][:1]
        what = round_, at, recorder.steps[at - 1][:2] if at else None
        with DataStream.open(image, index="memory", read_only=True) as stream:
            assert everything(stream) in before + after, what
        with DataStream.open(image, index="memory") as stream:
            assert everything(stream) in before + after, what
            stream.append(2, b"later")
        assert verify(image).problems == [], what
