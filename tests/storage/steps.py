"""The steps of a commit: of a file that is a double, one by one, and between the writes and the
report to the index.

The only place in the tests that has the arguments of `File.commit`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

import pytest

from datastreamer import DataStream
from datastreamer._packer import EntryPacker
from datastreamer.storage.disk._commit import EntriesNotWritten
from datastreamer.storage.disk.file_ops import Buffer

# In the order of `_commit.Descriptor.commit`.
COMMIT_ORDER = ("data", "header", "sync", "mark")

Writes = Sequence[tuple[memoryview, int]]


class SteppedCommit:
    """Goes before the file's class; `do_step` says what a step is."""

    def commit_order(self) -> Sequence[str]:
        return COMMIT_ORDER

    def do_step(self, step: str, writes: Writes) -> None:
        """The step of this name: what to write, and where. Nothing is written by a sync."""
        raise NotImplementedError

    def commit(
        self,
        packer: EntryPacker,
        page: Buffer,
        before: tuple[int, int],
        after: tuple[int, int],
        sync: bool,
        wakers: Sequence[int],
    ) -> None:
        data, head = packer.arena, memoryview(page)
        writes: dict[str, Writes] = {
            "data": [
                (data[start : start + length], offset) for offset, start, length in packer.segments
            ],
            "header": [(head[slice(*before)], before[0])],
            "sync": (),
            "mark": [(head[slice(*after)], after[0])],
        }
        for step in self.commit_order():
            if step == "sync" and not sync:
                continue
            try:
                self.do_step(step, writes[step])
            except OSError as error:
                kind = EntriesNotWritten if step == "data" else OSError
                raise kind(error.errno, error.strerror) from None
        for waker in wakers:
            os.write(waker, b"\0\0\0\0\0\0\0\1")


def before_the_report(
    stream: DataStream, monkeypatch: pytest.MonkeyPatch, act: Callable[[], None]
) -> None:
    """Until `monkeypatch` is undone, each commit calls `act` when it is visible, and has not
    reported its bookmarks."""
    owned = stream._ensure_writable().owned
    monkeypatch.setattr(owned, "wake_inside", act)
    monkeypatch.setattr(owned, "inside_wakers", [-1])
    owned.end.belong_to(owned)
