"""`split`: payloads from JSON lines, also invalid ones."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from datastreamer._codec import scan
from datastreamer.reassembly import PayloadComplete, Reassembler
from datastreamer.storage.stream import DataStream
from tests.cli.conftest import Invoke, Outcome

Split = Callable[..., Outcome]
ID = b"i" * 32
P, Q = b"\1".ljust(33, b"p"), b"\2".ljust(33, b"q")


class Input:
    """Standard input with some lines; an exception among them is raised."""

    closed = False

    def __init__(self, lines: tuple[Any, ...]) -> None:
        self.buffer = self
        self._lines = iter(lines)

    def readline(self, size: int) -> bytes:
        line = next(self._lines, b"")
        if isinstance(line, BaseException):
            raise line
        return line if isinstance(line, bytes) else json.dumps(line).encode() + b"\n"


@pytest.fixture
def split(invoke: Invoke, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Split:
    """``split(line, line, ..., options=[])`` into a new stream; a line is bytes or becomes JSON."""

    def run(*lines: Any, options: tuple[object, ...] = ("--create",)) -> Outcome:
        monkeypatch.setattr(sys, "stdin", Input(lines))
        return invoke("split", tmp_path / "s.bin", *options)

    return run


def hexed(own: bytes) -> str:
    return f"0x{own.hex()}"


def whole(path: Path, kind: int = 0x10) -> list[tuple[bytes, list[tuple[bytes, bytes]]]]:
    reassembler = Reassembler()
    found = []
    with DataStream.open(path, read_only=True) as stream:
        for batch in stream.batches():
            for event in reassembler.receive_batch(batch, type=kind):
                assert isinstance(event, PayloadComplete)
                found.append((event.id, event.parts))
    return found


def test_payloads(split: Split, tmp_path: Path) -> None:
    parts = [{"key": hexed(P + b"2"), "value": "0x"}, {"key": hexed(P + b"1"), "value": "0x61"}]
    done = split(
        {"id": hexed(ID), "parts": parts, "blobs": {hexed(Q): hexed(bytes(200))}},
        b"  \n",
        {"blobs": {}, "id": hexed(b"j" * 32)},
        options=("--create", "--limit", 200, "--type", 5),
    )
    assert (done.code, done.err) == (0, "")
    assert done.objects == [
        *[{"id": hexed(ID), "messages": 5, "first_entry": 0, "entries": 6, "total_entries": 6}],
        {
            "id": hexed(b"j" * 32),
            "messages": 1,
            "first_entry": 6,
            "entries": 2,
            "total_entries": 8,
        },
    ]
    assert whole(tmp_path / "s.bin", 5) == [
        (
            ID,
            [
                *[(P + b"1", b"a"), (P + b"2", b"")],
                *[(Q + bytes(4), bytes(163)), (Q + bytes([0, 0, 0, 1]), bytes(37))],
            ],
        ),
        (b"j" * 32, []),
    ]


def test_it_continues_in_an_existing_stream(split: Split, tmp_path: Path) -> None:
    assert split({"id": hexed(ID), "parts": []}).code == 0
    assert split({"id": hexed(b"j" * 32), "parts": []}, options=()).code == 0
    assert [own for own, _ in whole(tmp_path / "s.bin")] == [ID, b"j" * 32]


@pytest.mark.parametrize(
    "line, why",
    [
        (b"{", "it is not JSON"),
        (b"null", "it is null; a line is"),
        ({"id": hexed(ID)}, "a line is"),
        ({"id": hexed(ID), "parts": [], "more": 1}, "a line is"),
        ({"id": hexed(ID), "parts": {}}, '"parts" is {}'),
        ({"id": hexed(ID), "parts": [{"key": hexed(P)}]}, "a part is"),
        ({"id": hexed(ID), "parts": [{"key": hexed(P), "value": "61"}]}, '"61" is not hex'),
        ({"id": 7, "parts": []}, "7 is not hex"),
        ({"id": "0x00", "parts": []}, "a payload's id must have 32 bytes, not 1"),
        ({"id": hexed(ID), "blobs": {"0x01": "0x"}}, "invalid prefix 0x01"),
        (
            {"id": hexed(ID), "parts": [{"key": hexed(P), "value": hexed(bytes(300))}]},
            "limit of 200",
        ),
        (
            {
                "id": hexed(ID),
                "parts": [{"key": hexed(P), "value": "0x"}],
                "blobs": {hexed(P): "0x"},
            },
            "has a blob and other parts",
        ),
    ],
)
def test_invalid_lines(split: Split, tmp_path: Path, line: Any, why: str) -> None:
    good = {"id": hexed(ID), "parts": []}
    done = split(good, line, good, options=("--create", "--limit", 200))
    message = done.failed()
    assert message.startswith("line 2: ")
    assert why in message
    assert message.endswith("the stream holds 2 entries")
    assert len(done.objects) == 1
    assert len(whole(tmp_path / "s.bin")) == 1


def test_what_reassemble_prints_of_an_order(split: Split, tmp_path: Path) -> None:
    block = {"number": 1, "hash": "0xaa", "parent": "0x"}
    done = split(
        {"id": hexed(ID), "parts": [], "block": block},
        {"rolled_back": [{**block, "id": hexed(ID)}]},
    )
    assert done.failed() == (
        "line 2: it rolls payloads back; a stream keeps what was appended; the stream holds 2 "
        "entries"
    )
    assert [own for own, _ in whole(tmp_path / "s.bin")] == [ID]


def test_interrupted(split: Split) -> None:
    message = split({"id": hexed(ID), "parts": []}, KeyboardInterrupt()).failed(130)
    assert message == "interrupted after line 1; the stream holds 2 entries"


@pytest.mark.parametrize(
    "options, why",
    [
        (("--limit", 110), "111"),
        (("--limit", 1_048_558), "1048557"),
        (("--type", 0xB0), "--type 176 is the entry type of bookmarks"),
        (("--system-id", 7), "require --create"),
        (("--token-file", "t"), "--token-file is for tcp://HOST:PORT"),
    ],
)
def test_wrong_usage(split: Split, options: tuple[Any, ...], why: str) -> None:
    assert why in split(options=options).failed(2)


def test_no_stream_and_no_input(split: Split, invoke: Invoke, monkeypatch: Any) -> None:
    assert "use --create to create an empty stream" in split(options=()).failed()
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO()))
    sys.stdin.close()
    message = invoke("split", "s.bin").failed()
    assert message == "standard input is closed; the command reads payloads from it, as JSON"


def test_each_payload_is_one_operation(split: Split, tmp_path: Path) -> None:
    """A bookmark of the id's first 16 bytes, then the messages, the header first."""
    split({"id": hexed(ID), "blobs": {hexed(P): "0x6161"}})
    with DataStream.open(tmp_path / "s.bin", read_only=True) as stream:
        assert stream.bookmark(ID[:16]) == 0
        (batch,) = list(stream.batches())
        assert [entry.type for entry in batch] == [0xB0, 0x10, 0x10]
        assert batch[1].data[2:35] == b"\0" + ID
        assert scan(batch.packed())[2].data == b"\0\x25" + P + bytes(4) + b"aa"
