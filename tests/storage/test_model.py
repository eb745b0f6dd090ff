"""A stream against a plain model of it: any order of calls, at the edges of pages.

The model is a list of entries and a list of the operation's. After every step what
the stream says is compared with it, through the writer, a follower and fresh opens.
"""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from datastreamer import DataStream
from datastreamer.errors import (
    BadRange,
    NoOperation,
    OperationOpen,
    UnknownBookmark,
    UnknownEntry,
    UpdateRefused,
)
from tests.storage.made import (
    BOOKMARK,
    FIRST,
    LARGEST,
    PAGE,
    Item,
    bookmarks_of,
    copied,
    power_cut,
    scan_file,
)

keys = st.sampled_from([b"k", b"l", b"m" * 16, b"\0"])
# What fills a page, nearly or exactly, and what comes after it.
sizes = st.one_of(
    st.integers(0, 40),
    st.sampled_from([LARGEST, LARGEST - 1, LARGEST - 17, LARGEST - 18, PAGE // 2, PAGE // 3]),
)
events = st.builds(
    lambda kind, size: (kind, bytes([kind]) * size), st.sampled_from([0, 1, 2, 0xAF, 0xFF]), sizes
)
entries = st.one_of(events, st.builds(lambda key: (BOOKMARK, key), keys))


class StreamModel(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(prefix="model"))
        self.path = self.folder / "s.bin"
        self.committed: list[Item] = []
        self.open: list[Item] | None = None
        self.epoch = 0

    @initialize(sync=st.sampled_from(["commit", "os"]), index=st.sampled_from(["lmdb", "memory"]))
    def create(self, sync: Any, index: str) -> None:
        self.options = {"sync": sync, "index": index}
        self.stream = DataStream.create(self.path, **self.options)
        self.follower = DataStream.open(self.path, follow=True, index=index)

    def _close(self) -> None:
        discards = pytest.warns(ResourceWarning) if self.open else contextlib.nullcontext()
        with discards:
            self.stream.close()

    def teardown(self) -> None:
        if hasattr(self, "stream"):
            self.follower.close()
            self._close()
            scanned = scan_file(self.path)
            assert [(e.type, e.data) for e in scanned] == self.committed
        shutil.rmtree(self.folder)

    # Operations.

    @rule()
    def begin(self) -> None:
        if self.open is not None:
            with pytest.raises(OperationOpen):
                self.stream.start_atomic_op()
            return
        self.stream.start_atomic_op()
        self.open = []

    @rule(entry=entries)
    def add(self, entry: Item) -> None:
        kind, data = entry
        put: Any = self.stream.add_entry if kind != BOOKMARK else self.stream.add_bookmark
        call = (kind, data) if kind != BOOKMARK else (data,)
        if self.open is None:
            with pytest.raises(NoOperation):
                put(*call)
            return
        assert put(*call) == len(self.committed) + len(self.open)
        self.open.append(entry)

    @precondition(lambda self: self.open is not None)
    @rule(many=st.lists(events, max_size=5))
    def add_entries(self, many: list[Item]) -> None:
        assert self.open is not None
        first = len(self.committed) + len(self.open)
        added = self.stream.add_entries([kind for kind, _ in many], [data for _, data in many])
        assert added == range(first, first + len(many))
        self.open += many

    @rule()
    def commit(self) -> None:
        if self.open is None:
            with pytest.raises(NoOperation):
                self.stream.commit_atomic_op()
            return
        self.stream.commit_atomic_op()
        self.committed += self.open
        self.open = None

    @rule(operation=st.lists(entries, min_size=1, max_size=4))
    def commit_at_once(self, operation: list[Item]) -> None:
        if self.open is not None:
            return
        self.begin()
        for entry in operation:
            self.add(entry)
        self.commit()

    @rule()
    def roll_back(self) -> None:
        if self.open is None:
            with pytest.raises(NoOperation):
                self.stream.rollback_atomic_op()
            return
        self.stream.rollback_atomic_op()
        self.open = None

    # Changes of what is committed.

    @rule(data=st.data())
    def truncate(self, data: st.DataObject) -> None:
        number = data.draw(st.integers(0, len(self.committed)), label="number")
        if self.open is not None:
            with pytest.raises(OperationOpen):
                self.stream.truncate(number)
        elif number == len(self.committed):
            with pytest.raises(UnknownEntry):
                self.stream.truncate(number)
        else:
            self.stream.truncate(number)
            del self.committed[number:]
            self.epoch += 1

    @precondition(lambda self: self.committed and self.open is None)
    @rule(data=st.data())
    def update(self, data: st.DataObject) -> None:
        number = data.draw(st.integers(0, len(self.committed) - 1), label="number")
        kind, old = self.committed[number]
        new = bytes(byte ^ 0x55 for byte in old)
        if kind == BOOKMARK:
            with pytest.raises(UpdateRefused):
                self.stream.update_entry(number, kind, new)
            return
        self.stream.update_entry(number, kind, new)
        self.committed[number] = (kind, new)
        self.epoch += 1

    @rule()
    def sync(self) -> None:
        self.stream.sync()

    @rule()
    def wait_for_the_index(self) -> None:
        self.stream.bookmarks.wait()
        if self.options["sync"] == "commit":
            assert self.stream.bookmarks.lag() == 0

    @rule()
    def reopen(self) -> None:
        self._close()
        self.open = None
        self.stream = DataStream.open(self.path, **self.options)
        assert self.stream.epoch == self.epoch

    @rule()
    def crash(self) -> None:
        """As the process ends: a copy of the file is opened, and continues."""
        copy = copied(self.path, "crash.bin")
        with DataStream.open(copy, index="memory") as stream:
            self.compare(stream)
            with stream.atomic_op() as op:
                op.add_entry(1, b"on")
            assert stream.total_entries == len(self.committed) + 1
        copy.unlink()

    @rule()
    def cut_the_power(self) -> None:
        """All of it had arrived."""
        copy = power_cut(self.path, self.folder / "cut.bin")
        with DataStream.open(copy, index="memory") as stream:
            self.compare(stream)
        copy.unlink()

    # Questions.

    @rule(data=st.data())
    def ask_for_an_entry(self, data: st.DataObject) -> None:
        number = data.draw(st.integers(-1, len(self.committed) + 1), label="number")
        if 0 <= number < len(self.committed):
            entry = self.stream.entry(number)
            assert (entry.number, entry.type, entry.data) == (number, *self.committed[number])
        else:
            with pytest.raises(UnknownEntry):
                self.stream.entry(number)

    @rule(data=st.data())
    def ask_for_a_range(self, data: st.DataObject) -> None:
        start = data.draw(st.integers(0, len(self.committed)), label="start")
        stop = data.draw(st.integers(0, len(self.committed) + 1), label="stop")
        found = [(e.type, e.data) for e in self.stream.entries(start, stop)]
        assert found == self.committed[start:stop]

    @rule(first=keys, last=keys)
    def ask_for_data_between(self, first: bytes, last: bytes) -> None:
        known = self.known()
        if first not in known or last not in known:
            error: Any = UnknownBookmark
        elif known[first] > known[last]:
            error = BadRange
        else:
            found = self.stream.data_between_bookmarks(first, last)
            between = self.committed[known[first] : known[last]]
            assert found == b"".join(data for kind, data in between if kind != BOOKMARK)
            return
        with pytest.raises(error):
            self.stream.data_between_bookmarks(first, last)

    def known(self) -> dict[bytes, int]:
        return {
            data: number for number, (kind, data) in enumerate(self.committed) if kind == BOOKMARK
        }

    def compare(self, stream: DataStream) -> None:
        assert stream.total_entries == len(self.committed)
        assert [(e.type, e.data) for e in stream.entries()] == self.committed
        known = self.known()
        for key in (b"k", b"l", b"m" * 16, b"\0"):
            if key in known:
                assert stream.bookmark(key) == known[key]
                behind = range(known[key], len(self.committed))
                events = [n for n in behind if self.committed[n][0] != BOOKMARK]
                if events:
                    assert stream.first_event_after_bookmark(key).number == events[0]
            else:
                with pytest.raises(UnknownBookmark):
                    stream.bookmark(key)

    @invariant()
    def both_see_it(self) -> None:
        if not hasattr(self, "stream"):
            return
        self.compare(self.stream)
        self.follower.refresh()
        assert self.follower.epoch == self.epoch
        self.compare(self.follower)
        size = self.path.stat().st_size
        assert (size - FIRST) % PAGE == 0
        assert size > self.stream.header.total_length
        scanned = scan_file(self.path)
        assert bookmarks_of(scanned) == self.known()


TestStreamModel = StreamModel.TestCase
TestStreamModel.settings = settings(max_examples=15, stateful_step_count=25, deadline=None)
