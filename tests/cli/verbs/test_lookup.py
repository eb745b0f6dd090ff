"""`entry` and `bookmark`: one entry, from a file and from a server."""

from __future__ import annotations

from pathlib import Path

import pytest

from datastreamer.storage.stream import DataStream
from tests.cli.conftest import Invoke


def test_an_entry(invoke: Invoke, source: str) -> None:
    found = invoke("entry", source, 4)
    assert found.code == 0
    (entry,) = found.objects
    assert (entry["number"], entry["type"], entry["length"]) == (4, 3, 72)
    assert len(entry["data"]) == 2 + 2 * 72


def test_an_unknown_entry(invoke: Invoke, source: str) -> None:
    result = f"{source}: no entry 200: the stream holds 0 to 199"
    assert invoke("entry", source, 200).failed() == result


@pytest.mark.parametrize(
    "key", ["block:7", "0x000000000000000007", "0X000000000000000007", "batch:7"]
)
def test_the_first_event_at_a_bookmark(invoke: Invoke, source: str, key: str) -> None:
    assert invoke("bookmark", source, key).objects[0]["number"] == 37


@pytest.mark.parametrize("key, number", [("batch:7", b"35\n"), ("block:7", b"36\n")])
def test_the_number_of_the_bookmark_itself(
    invoke: Invoke, source: str, key: str, number: bytes
) -> None:
    assert invoke("bookmark", source, key, "--entry-number") == (0, number, "")


@pytest.mark.parametrize("options", [[], ["--entry-number"]])
def test_an_unknown_bookmark(invoke: Invoke, source: str, options: list[str]) -> None:
    message = f"{source}: no bookmark block:40 in the stream"
    if source.startswith("127.") and not options:
        # The server's answer is the same for both.
        message += ", or no event follows it"
    assert invoke("bookmark", source, "block:40", *options).failed() == message


def test_keys_as_text(invoke: Invoke, tmp_path: Path) -> None:
    with DataStream.create(tmp_path / "text.bin", sync="os") as stream, stream.atomic_op() as op:
        op.add_bookmark(b"a key")
        op.add_entry(7, b"\x00found")
        op.add_bookmark("clé".encode())
    path = tmp_path / "text.bin"
    assert invoke("bookmark", path, "a key").objects[0]["data"] == "0x00666f756e64"
    assert invoke("bookmark", path, "clé", "--entry-number").out == b"2\n"
    assert "no event follows" in invoke("bookmark", path, "clé").failed()


def test_the_stream_version_determines_the_key(invoke: Invoke, real_stream: Path) -> None:
    for key, number in [("batch:0", 0), ("batch:1", 5), ("batch:2", 12), ("0x08011002", 12)]:
        assert invoke("bookmark", real_stream, key, "--entry-number").lines == [str(number)]


def test_the_table(invoke: Invoke, source: str) -> None:
    lines = invoke("entry", source, 0, "--format", "table").lines
    assert [line.split() for line in lines[:4]] == [
        ["number", "0"],
        ["type", "bookmark"],
        ["length", "9"],
        ["key", "batch:0"],
    ]
    assert lines[4].split()[:4] == ["data", "0000", "01", "00"]
    assert len(lines) == 5


def test_long_data_is_cut_for_people(invoke: Invoke, tmp_path: Path) -> None:
    with DataStream.create(tmp_path / "long.bin", sync="os") as stream, stream.atomic_op() as op:
        op.add_entry(7, bytes(range(256)) * 40)
    lines = invoke("entry", tmp_path / "long.bin", 0, "--format", "table").lines
    assert len(lines) == 3 + 512 // 16 + 1
    assert "9728 more bytes" in lines[-1]
    assert len(invoke("entry", tmp_path / "long.bin", 0, "--format", "raw").out) == 17 + 256 * 40
