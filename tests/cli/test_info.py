"""`info`: the facts of a stream."""

from __future__ import annotations

import json
import socket
from pathlib import Path

import pytest

from datastreamer.format import Header
from datastreamer.net.embed import StreamServer
from datastreamer.storage.stream import DataStream
from tests.cli.conftest import Invoke
from tests.interop.plain import header, scan


def test_a_file(invoke: Invoke, made: Path) -> None:
    (facts,) = invoke("info", made).objects
    assert list(facts) == [
        *("version", "system_id", "stream_type", "total_length", "total_entries"),
        *("pages", "file_size", "bookmarks", "entries_by_type", "bytes_by_type"),
    ]
    entries = scan(made)
    kinds = {entry.type for entry in entries}
    assert {name: facts[name] for name in header(made)} == header(made)
    assert facts["pages"] == 1
    assert facts["file_size"] == made.stat().st_size
    assert facts["bookmarks"] == 80
    assert facts["entries_by_type"] == {
        str(kind): sum(e.type == kind for e in entries) for kind in kinds
    }
    assert facts["bytes_by_type"] == {
        str(kind): sum(len(e.packed) for e in entries if e.type == kind) for kind in kinds
    }


def test_a_server(invoke: Invoke, made: Path, server: str) -> None:
    (facts,) = invoke("info", server, "--json").objects
    assert facts == header(made)
    assert list(facts)[:3] == ["version", "system_id", "stream_type"]


@pytest.mark.skipif(not socket.has_ipv6, reason="this machine speaks no IPv6")
@pytest.mark.parametrize("form", ["[::1]:{}", "tcp://[::1]:{}", "localhost:{}"])
def test_names_of_servers(invoke: Invoke, copy: Path, form: str) -> None:
    with StreamServer(copy, port=0, in_process=True) as serving:
        assert invoke("info", form.format(serving.port)).objects[0]["total_entries"] == 200


def _by_type(*counts: int) -> dict[str, int]:
    return dict(zip(("1", "2", "3", "4", "6", "176"), counts, strict=True))


def test_the_real_stream(invoke: Invoke, real_stream: Path) -> None:
    (facts,) = invoke("info", real_stream).objects
    assert facts == {
        "version": 2,
        "system_id": 1,
        "stream_type": 1,
        "total_length": 5_421_190,
        "total_entries": 34_723,
        "pages": 6,
        "file_size": 104_861_696,
        "bookmarks": 11_420,
        "entries_by_type": _by_type(102, 11_318, 465, 101, 11_317, 11_420),
        "bytes_by_type": _by_type(2_648, 2_512_315, 2_395_702, 8_785, 226_213, 251_006),
    }


def test_an_empty_stream(invoke: Invoke, tmp_path: Path) -> None:
    DataStream.create(tmp_path / "empty.bin", system_id=2**64 - 1, sync="os").close()
    (facts,) = invoke("info", tmp_path / "empty.bin").objects
    assert (facts["system_id"], facts["pages"], facts["entries_by_type"]) == (2**64 - 1, 0, {})
    assert invoke("info", tmp_path / "empty.bin", "--format", "table").code == 0


def test_for_people(invoke: Invoke, source: str) -> None:
    text = invoke("info", source, "--format", "table").out.decode()
    assert "system id     137" in text
    assert "entries       200" in text
    assert ("bookmark" in text) == (":" not in source)


def test_the_header_itself(invoke: Invoke, made: Path, source: str) -> None:
    raw = invoke("info", source, "--format", "raw").out
    assert Header.unpack(raw)._asdict() == header(made)
    assert invoke("info", source, "--format", "hex").out.decode() == f"{raw.hex()}\n"


def test_facts_are_one_line(invoke: Invoke, made: Path) -> None:
    out = invoke("info", made, "--format", "jsonl").out
    assert out.count(b"\n") == 1
    assert json.loads(out)["total_entries"] == 200
