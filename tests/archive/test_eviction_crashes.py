"""Kills and power cuts at each step of an eviction, and of what brings pages back."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from datastreamer import DataStream
from datastreamer.errors import DamagedEntry
from datastreamer.storage.maintain.check import verify
from datastreamer.storage.objects.store import Store
from datastreamer.storage.read import open_file
from datastreamer.storage.read.evicted import PagedFile
from tests.archive.evicting import Fields, everything, evict, made, marked_copy, pushed

SECTOR, BLOCK = 512, 4096
BESIDE = (".sums", ".undo")


class Step(NamedTuple):
    """One write, hole (no data) or change of the size (`size` is -1), or a sync (no span); and what
    the files beside the stream hold after it."""

    offset: int
    size: int
    data: bytes | None
    beside: dict[str, bytes]


class Recorder:
    """What one writer does to its file, and the state of the stream after each of its calls."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.begin = path.read_bytes()
        self.steps: list[Step] = []
        self.states: list[tuple[int, list[Fields]]] = []
        # The file after the step of this number, and all before it.
        self._whole: dict[int, bytes] = {0: self.begin}

    def note(self, offset: int, size: int, data: bytes | None = None) -> None:
        places = [(end, self.path.with_name(self.path.name + end)) for end in BESIDE]
        beside = {end: place.read_bytes() for end, place in places if place.exists()}
        self.steps.append(Step(offset, size, data, beside))

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
                old = recorder.path.read_bytes()
                super().commit(packer, page, before, after, *rest)
                content = recorder.path.read_bytes()
                assert len(content) == len(old)
                # The header last.
                for at in reversed(range(0, len(old), BLOCK)):
                    part = content[at : at + BLOCK]
                    if part != old[at : at + BLOCK]:
                        recorder.note(at, len(part), part)
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

    def image(self, choose: random.Random, at: int, power: bool) -> bytes:
        """The file if the process is killed in step `at`, or the power fails then."""
        if not power:
            image = bytearray(self._up_to(at))
            if at < len(self.steps):
                offset, size, data, _ = self.steps[at]
                # Cut short between two blocks.
                stop = min(size, choose.randrange(size // BLOCK + 1) * BLOCK) if size > 0 else 0
                image[offset : offset + stop] = bytes(stop) if data is None else data[:stop]
            return bytes(image)
        sure = max((k + 1 for k in range(at) if not self.steps[k].size), default=0)
        image = bytearray(self._up_to(sure))
        share = choose.choice((0.1, 0.5, 0.5, 0.9))
        for step in self.steps[sure:at]:
            offset, size, data, _ = step
            if size < 0:
                _apply(image, step)
            for start in range(0, max(0, size), SECTOR):
                if choose.random() < share:
                    stop = min(start + SECTOR, size)
                    part = bytes(stop - start) if data is None else data[start:stop]
                    image[offset + start : offset + stop] = part
        return bytes(image)

    def _up_to(self, count: int) -> bytes:
        """The file after that many steps."""
        if count not in self._whole:
            known = max(each for each in self._whole if each < count)
            image = bytearray(self._whole[known])
            for step in self.steps[known:count]:
                _apply(image, step)
            self._whole[count] = bytes(image)
        return self._whole[count]


def _apply(image: bytearray, step: Step) -> None:
    offset, size, data, _ = step
    if size < 0:
        image[offset:] = b""
        image.extend(bytes(offset - len(image)))
    else:
        image[offset : offset + size] = bytes(size) if data is None else data


def work(recorder: Recorder, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(open_file, "PagedFile", recorder.file())
    with DataStream.open(recorder.path, index="memory") as stream:

        def update(first: int) -> None:
            old = next(it for it in stream.entries(first) if it.type != 176 and it.data)
            stream.update_entry(old.number, old.type, b"x" * len(old.data))

        recorder.state(stream)
        for do in (
            lambda: evict(stream, url, 1),
            lambda: evict(stream, url, 3),
            lambda: update(stream.floor - 20),  # in page 2
            lambda: stream.truncate(60),  # in page 1
            lambda: stream.append(2, b"more" * 100),
            lambda: stream.parts.pages.bring_back(0),
            lambda: pushed(recorder.path, url),
            lambda: evict(stream, url, 1),
            lambda: stream.truncate(5),
        ):
            do()
            recorder.state(stream)
    monkeypatch.undo()


@contextlib.contextmanager
def _updates_may_be_interrupted() -> Iterator[None]:
    """Until a writer opens the file, it has old and new bytes."""
    try:
        yield
    except DamagedEntry as error:
        if "a crash interrupted the update" not in str(error):
            raise


SOAK = [pytest.param(seed, 1000, marks=pytest.mark.soak) for seed in range(1, 11)]


@pytest.mark.parametrize(("seed", "rounds"), [(0, 60), *SOAK])
def test_nothing_is_lost(
    seed: int, rounds: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    twin, url = made(tmp_path / "twin.bin", 4), (tmp_path / "archive").as_uri()
    path = marked_copy(twin, tmp_path / "s.bin", url)
    recorder = Recorder(path)
    work(recorder, url, monkeypatch)
    image = tmp_path / "image.bin"
    choose = random.Random(seed)
    # A thread for each request takes longer than the request.
    monkeypatch.setattr(Store, "_answer", lambda self, call: call())
    for round_ in range(rounds):
        at, power = choose.randrange(len(recorder.steps) + 1), round_ % 2 == 0
        for old in tmp_path.glob("image.bin*"):
            old.unlink()
        image.write_bytes(recorder.image(choose, at, power))
        for end, content in recorder.steps[at - 1].beside.items() if at else ():
            image.with_name(image.name + end).write_bytes(content)
        before = [state for steps, state in recorder.states if steps <= at][-1:]
        after = [state for steps, state in recorder.states if steps > at][:1]
        what = round_, at, recorder.steps[at - 1][:2] if at else None
        with (
            _updates_may_be_interrupted(),
            DataStream.open(image, index="memory", read_only=True) as stream,
        ):
            assert everything(stream) in before + after, what
        with DataStream.open(image, index="memory") as stream:
            assert everything(stream) in before + after, what
            stream.append(2, b"later")
        assert verify(image).problems == [], what
