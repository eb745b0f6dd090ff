"""`append`: operations from JSON lines, also those that are not committed."""

from __future__ import annotations

import errno
import io
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from datastreamer.storage.bookmarks import lmdb_environment
from datastreamer.storage.stream import DataStream
from tests.cli.conftest import ENTRIES, Invoke, Outcome
from tests.cli.process import ENVIRONMENT, PATIENCE, command
from tests.storage.made import BOOKMARK, LARGEST, FaultyDisk, header_of, scan_file

COMMIT = {"commit": True}
ROLLBACK = {"rollback": True}
Append = Callable[..., Outcome]


class Input:
    """Standard input; a callable among its lines is called when it is read."""

    closed = False

    def __init__(self, lines: Iterable[Any]) -> None:
        self.buffer = self
        self._lines = iter(lines)

    def readline(self, size: int) -> bytes:
        for line in self._lines:
            if callable(line):
                line()
                continue
            content = line if isinstance(line, bytes) else json.dumps(line).encode() + b"\n"
            return io.BytesIO(content).readline(size)
        return b""


@pytest.fixture
def append(invoke: Invoke, monkeypatch: pytest.MonkeyPatch) -> Append:
    """``append(path, line, line, ..., options=[])``; a line is bytes or becomes JSON."""

    def run(path: Path, *lines: Any, options: tuple[object, ...] = ()) -> Outcome:
        monkeypatch.setattr(sys, "stdin", Input(lines))
        return invoke("append", path, *options)

    return run


def event(kind: int, data: bytes) -> dict[str, Any]:
    return {"type": kind, "data": f"0x{data.hex()}"}


def mark(key: bytes) -> dict[str, Any]:
    return {"bookmark": f"0x{key.hex()}"}


def held(path: Path, start: int = ENTRIES) -> list[tuple[int, bytes]]:
    return [(entry.type, entry.data) for entry in scan_file(path)[start:]]


def test_operations(append: Append, copy: Path) -> None:
    done = append(
        copy,
        *(mark(b"key"), event(7, b"one"), event(0xFFFFFFFF, b""), COMMIT),
        *(event(1, b"forgotten"), ROLLBACK, ROLLBACK),
        *(b"\n", b'  {"data": "0x0A0b", "type": 0}', COMMIT),
        *(event(1, bytes(LARGEST)), b'{"commit": true}'),
    )
    assert (done.code, done.err) == (0, "")
    assert done.objects == [
        {"first_entry": 200, "entries": 3, "total_entries": 203},
        {"first_entry": 203, "entries": 1, "total_entries": 204},
        {"first_entry": 204, "entries": 1, "total_entries": 205},
    ]
    assert done.lines[0] == '{"first_entry": 200, "entries": 3, "total_entries": 203}'
    assert held(copy) == [
        *((BOOKMARK, b"key"), (7, b"one"), (0xFFFFFFFF, b"")),
        *((0, b"\n\x0b"), (1, bytes(LARGEST))),
    ]
    with DataStream.open(copy, read_only=True) as stream:
        assert stream.bookmark(b"key") == 200


def test_nothing_to_do(append: Append, copy: Path) -> None:
    assert append(copy) == (0, b"", "")
    empty = append(copy, COMMIT).objects
    assert empty == [{"first_entry": 200, "entries": 0, "total_entries": 200}]


def test_input_that_ends_without_a_commit(append: Append, copy: Path) -> None:
    ended = append(copy, event(1, b"a"), COMMIT, mark(b"b"), event(1, b"c"))
    assert ended.failed() == (
        "the input ended after line 4 without a commit; the open operation (2 entries) was "
        "rolled back, the stream holds 201 entries"
    )
    assert len(ended.lines) == 1
    assert held(copy) == [(1, b"a")]


@pytest.mark.parametrize(
    "line, why",
    [
        (b"{", "it is not JSON (Expecting property name"),
        (b"\xff\n", "it is not JSON ("),
        (b'\xef\xbb\xbf{"commit": true}\n', "it begins with a byte order mark"),
        (b"1" * 5000, "it has a number with too many digits"),
        (b"[" * 100_000, "it is nested too deep"),
        (b"[]", "it is []; a line is"),
        (b"null", "it is null; a line is"),
        (b"{}", "it is {}; a line is"),
        ({"commit": False}, 'it is {"commit": false}; a line is'),
        ({"commit": 1}, 'it is {"commit": 1}; a line is'),
        ({"rollback": "yes"}, 'it is {"rollback": "yes"}; a line is'),
        ({"commit": True, "rollback": True}, "a line is"),
        ({"type": 3}, 'it is {"type": 3}; a line is'),
        ({"type": 3, "data": "0x", "number": 7, "other": 1}, "a line is"),
        ({"type": 3, "data": "0x0"}, '"0x0" is not hex'),
        ({"type": 3, "data": "00"}, '"00" is not hex'),
        ({"type": 3, "data": "0x0 0"}, '"0x0 0" is not hex'),
        ({"type": 3, "data": "0x0\ud8000"}, "is not hex"),
        ({"type": 3, "data": 0}, "0 is not hex"),
        ({"type": "3", "data": "0x"}, 'an entry type is a number, not "3"'),
        ({"type": True, "data": "0x"}, "an entry type is a number, not true"),
        ({"type": 1.0, "data": "0x"}, "an entry type is a number, not 1.0"),
        ({"type": -1, "data": "0x"}, "-1"),
        ({"type": 1 << 32, "data": "0x"}, "4294967296"),
        ({"type": 0xB0, "data": "0x"}, "bookmark"),
        ({"type": 3, "data": f"0x{bytes(LARGEST + 1).hex()}"}, "not 1,048,560"),
        ({"bookmark": "0x"}, "1 to 16 bytes"),
        ({"bookmark": f"0x{bytes(17).hex()}"}, "1 to 16 bytes"),
        (b" " * (1 << 23), "it is longer than"),
    ],
)
def test_a_wrong_line(append: Append, copy: Path, line: Any, why: str) -> None:
    wrong = append(copy, event(1, b"a"), COMMIT, event(2, b"b"), line, COMMIT)
    text = wrong.failed()
    assert text.startswith("line 4: ")
    assert why in text
    rolled_back = "the open operation (1 entry) was rolled back, the stream holds 201 entries"
    assert text.endswith(rolled_back)
    assert len(text) < 400
    assert held(copy) == [(1, b"a")]


def test_a_wrong_line_with_nothing_open(append: Append, copy: Path) -> None:
    failed = append(copy, b"nonsense\n").failed()
    assert failed.startswith("line 1: it is not JSON (")
    assert failed.endswith("; no operation was open, the stream holds 200 entries")


def test_a_stream_is_created(append: Append, tmp_path: Path) -> None:
    path = tmp_path / "new.bin"
    what = ("--create", "--system-id", 7, "--stream-version", 3, "--stream-type", 2)
    assert append(path, options=what[1:]).failed(2).endswith("has its own")
    assert "no such file; use --create to create" in append(path).failed()
    assert not path.exists()
    assert append(path, event(1, b"x"), COMMIT, options=what).code == 0
    assert header_of(path)[2:5] == (3, 7, 2)
    warned = append(path, event(1, b"y"), COMMIT, options=("--create", "--system-id", 8))
    assert warned.code == 0
    assert "the system id of the existing file is 7, not 8" in warned.err
    assert held(path, 0) == [(1, b"x"), (1, b"y")]


# Signals.


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_rolls_back(append: Append, copy: Path, number: signal.Signals) -> None:
    ended = append(
        copy,
        *(event(1, b"a"), COMMIT, event(2, b"b")),
        *(lambda: signal.raise_signal(number), event(3, b"c"), COMMIT),
    )
    how = {signal.SIGINT: "interrupted", signal.SIGTERM: "ended by SIGTERM"}[number]
    assert ended.failed(128 + number) == (
        f"{how} after line 3; the open operation (1 entry) was rolled back, "
        "the stream holds 201 entries"
    )
    assert held(copy) == [(1, b"a")]


def test_a_signal_waits_for_the_commit(
    append: Append, copy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit = DataStream.commit_atomic_op

    def interrupted(stream: DataStream) -> None:
        signal.raise_signal(signal.SIGINT)
        commit(stream)

    monkeypatch.setattr(DataStream, "commit_atomic_op", interrupted)
    ended = append(copy, event(1, b"a"), COMMIT, event(1, b"b"), COMMIT)
    assert ended.objects == [{"first_entry": 200, "entries": 1, "total_entries": 201}]
    assert ended.failed(130).startswith("interrupted after line 2; no operation was open")
    assert held(copy) == [(1, b"a")]


# Disks.


def test_a_full_disk(append: Append, copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = FaultyDisk()
    monkeypatch.setattr("datastreamer.storage.write.opening.OsDisk", lambda: disk)

    def fill() -> None:
        disk.faults["commit data"] = errno.ENOSPC

    failed = append(copy, event(1, b"a"), COMMIT, event(1, b"b"), fill, COMMIT, event(1, b"c"))
    assert failed.failed() == (
        f"line 4: {copy}: the system refused to write: No space left on device; the open "
        "operation (1 entry) was rolled back, the stream holds 201 entries"
    )
    assert held(copy) == [(1, b"a")]


@pytest.mark.parametrize("mended", [True, False])
def test_a_sync_that_fails(
    append: Append, copy: Path, monkeypatch: pytest.MonkeyPatch, mended: bool
) -> None:
    disk = FaultyDisk()
    monkeypatch.setattr("datastreamer.storage.write.opening.OsDisk", lambda: disk)

    def fail() -> None:
        disk.faults["commit sync"] = errno.EIO
        if not mended:
            disk.faults["sync"] = errno.EIO

    failed = append(copy, event(1, b"b"), fail, COMMIT)
    assert failed.out == b""
    text, *more = [line for line in failed.err.splitlines() if line.startswith("error: ")]
    assert text.startswith(f"error: line 2: {copy}: ")
    assert "Input/output error" in text
    assert ("the open operation (1 entry) was rolled back" in text) == mended
    assert failed.code == 1
    # Closing the stream cannot roll the operation back either.
    assert len(more) == (not mended)
    for line in more:
        assert line.startswith(f"error: {copy}: the system refused to write: Input/output error; ")
        assert "whether the operation from entry 200 on is on disk is not known" in line
        assert "the stream is closed; open it for writing when the disk works" in line


# As a process.


def _started(path: Path, **streams: Any) -> subprocess.Popen[str]:
    streams = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, **streams}
    return subprocess.Popen(
        command("append", path), text=True, stderr=subprocess.PIPE, env=ENVIRONMENT, **streams
    )


def test_each_commit_is_printed_when_it_is_durable(copy: Path) -> None:
    with _started(copy) as process, DataStream.open(copy, follow=True) as follower:
        assert process.stdin is not None
        assert process.stdout is not None
        for number in range(ENTRIES, ENTRIES + 3):
            process.stdin.write('{"type": 7, "data": "0x01"}\n{"commit": true}\n')
            process.stdin.flush()
            result = json.loads(process.stdout.readline())
            assert result == {"first_entry": number, "entries": 1, "total_entries": number + 1}
            follower.refresh()
            assert follower.total_entries == number + 1
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == 143
    assert out == ""
    assert err.startswith("error: ended by SIGTERM after line 6; no operation was open")
    assert err.count("\n") == 1


def test_results_that_no_program_reads(copy: Path) -> None:
    ours, theirs = os.pipe()
    os.close(ours)
    lines = '{"type": 7, "data": "0x01"}\n{"commit": true}\n' * 3
    with _started(copy, stdout=theirs) as process:
        os.close(theirs)
        err = process.communicate(lines, timeout=PATIENCE)[1]
    assert (process.returncode, err) == (0, "")
    assert held(copy) == [(7, b"\1")] * 3


def test_no_input_at_all(copy: Path) -> None:
    words = " ".join(command("append", copy))
    closed = subprocess.run(
        f"{words} <&-", shell=True, check=False, env=ENVIRONMENT, capture_output=True, text=True
    )
    assert closed.returncode == 1
    assert closed.stderr.startswith("error: standard input is closed")
    assert closed.stderr.count("\n") == 1


def test_texts_and_keys(append: Append, copy: Path) -> None:
    done = append(
        copy,
        *({"bookmark": "block:7"}, {"bookmark": "a key"}, {"bookmark": "0x0102"}),
        *({"type": 7, "text": "tšxt"}, {"type": BOOKMARK, "text": "key"}, COMMIT),
    )
    assert done.code == 0
    assert held(copy) == [
        *((BOOKMARK, b"\0" + (7).to_bytes(8, "big")), (BOOKMARK, b"a key")),
        *((BOOKMARK, b"\x01\x02"), (7, "tšxt".encode()), (BOOKMARK, b"key")),
    ]


@pytest.mark.parametrize(
    "line, message",
    [
        ({"bookmark": 7}, "7 is not a key"),
        ({"bookmark": "block:x"}, "the part after block: is a number"),
        ({"bookmark": ""}, "the key of a bookmark has 1 to 16 bytes"),
        ({"type": 7, "text": 7}, "7 is not a text"),
        (b'{"type": 7, "text": "\\ud800"}\n', "half of a surrogate pair"),
        ({"type": 7, "text": "a", "data": "0x"}, "a line is"),
        ({"type": 7, "text": "a", "other": 1}, "a line is"),
    ],
)
def test_texts_and_keys_that_are_wrong(append: Append, copy: Path, line: Any, message: str) -> None:
    assert message in append(copy, line).failed()


def test_what_cat_prints_is_appended(
    append: Append, invoke: Invoke, made: Path, tmp_path: Path
) -> None:
    new = tmp_path / "new.bin"
    printed = invoke("cat", made, "--json").objects
    done = append(new, *printed, options=("--create",))
    assert done.objects == [{"first_entry": 0, "entries": ENTRIES, "total_entries": ENTRIES}]
    assert held(new, 0) == held(made, 0)
    # Decoded and edited; new numbers.
    decoded = invoke("cat", made, "--json", "--decode", "zkevm", "--last", "2").objects
    del decoded[1]["data"]
    assert append(new, *decoded[:1], {**decoded[1], "text": "edited"}).code == 0
    assert held(new)[1] == (decoded[1]["type"], b"edited")
    # A line without a number is no copy: the operation needs a commit.
    assert "without a commit" in append(new, *printed[:3], event(1, b"a")).failed()


def test_no_room_for_an_index(append: Append, copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The entries are appended, and the next writer builds the index."""

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(lmdb_environment, "_reserve", full)
    done = append(copy, mark(b"new"), COMMIT)
    assert done.code == 0, done
    assert done.objects[0]["total_entries"] == ENTRIES + 1
    assert "the bookmark index is kept in memory until it fits on disk" in done.err
