"""`info`: the facts of a stream."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
from pathlib import Path

import pytest

from datastreamer.format import Header
from datastreamer.service.embedded import StreamServer
from datastreamer.storage.disk.access import Access
from datastreamer.storage.disk.file_ops import OsDisk, boot_id
from datastreamer.storage.header import records
from datastreamer.storage.header import undo_journal as journal
from datastreamer.storage.header.records import PublisherRecord, Writer
from datastreamer.storage.header.undo_journal import Undo
from datastreamer.storage.stream import DataStream
from tests.cli.conftest import Invoke
from tests.conftest import Golden
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


def test_the_table(invoke: Invoke, source: str) -> None:
    text = invoke("info", source, "--format", "table").out.decode()
    assert "system id     137" in text
    assert "entries       200" in text
    assert ("bookmark" in text) == (not source.startswith("127."))
    assert ("file size" in text) == (not source.startswith("127."))


def rows(invoke: Invoke, path: Path, code: int = 0) -> dict[str, str]:
    """The table's facts: title -> value."""
    shown = invoke("info", path, "--format", "table")
    assert shown.code == code, shown
    lines = shown.out.decode().split("\n\n")[0].splitlines()[1:]
    return {line[:14].strip(): line[14:].strip() for line in lines}


def test_the_records_in_the_table(invoke: Invoke, copy: Path) -> None:
    found = rows(invoke, copy)
    assert found["record"] == "matches the header; synced: everything"
    assert found["visible"] == found["last synced"] == f"200 entries, {found['length']}"
    assert found["index"] == "there is no bookmark index (lmdb)"
    assert found["writer"].endswith("alive; the file is not locked")  # this very process, before
    header = Header.unpack(copy.read_bytes()[16:])
    behind = copy.stat().st_size - header.total_length
    assert found["reserved"].startswith(f"{behind:,} bytes after the end; ")
    with DataStream.open(copy, sync="os") as stream:
        assert found["stream id"] == stream.stream_id.hex()
        stream.bookmarks.wait()
        with stream.atomic_op() as op:
            op.add_bookmark(b"new")
        found = rows(invoke, copy)
        assert found["writer"] == f"process {os.getpid()}, alive; the file is locked for writing"
        assert found["record"].startswith("matches the header; synced: 200 entries, ")
        assert found["visible"].startswith("201 entries, ")
        assert found["last synced"].startswith("200 entries, ")
        assert found["index"] == "lmdb, up to entry 200, lag 1 entry"
        stream.truncate(100)
        assert rows(invoke, copy)["epoch"] == "1"
    assert rows(invoke, copy)["index"] == "lmdb, up to entry 100, lag 0 entries"


def test_a_writer_that_has_ended(invoke: Invoke, copy: Path) -> None:
    gone = subprocess.Popen(["true"])
    gone.wait()
    page = bytearray(copy.read_bytes()[:4096])
    records.put_writer(page, Writer(gone.pid, boot_id()))
    with copy.open("r+b") as file:
        file.write(page)
    assert rows(invoke, copy)["writer"] == f"process {gone.pid}, ended; the file is not locked"


def test_an_interrupted_update(invoke: Invoke, copy: Path) -> None:
    assert "undo" not in rows(invoke, copy)
    header = copy.read_bytes()[16:54]
    with DataStream.open(copy, read_only=True) as stream:
        undo = Undo(stream.stream_id, stream.epoch, header, 4096, b"neither", b"of them")
    journal.put(OsDisk(), str(copy), undo, Access.private())
    assert "an update is in progress" in rows(invoke, copy)["undo"]
    undo = undo._replace(old=bytes(600), new=b"\1" * 600, offset=1 << 20)
    Path(f"{copy}.undo").unlink()
    journal.put(OsDisk(), str(copy), undo, Access.private())
    _damage(copy, 1 << 20, bytes(512) + b"\1" * 88)
    assert "an update is in progress" in rows(invoke, copy, code=1)["undo"]
    assert "a crash interrupted the update of an entry" in invoke("info", copy).failed()


def test_an_index_of_another_file(invoke: Invoke, copy: Path) -> None:
    with DataStream.open(copy) as stream:
        stream.bookmarks.wait()
    shutil.copy(copy, f"{copy}.old")
    os.replace(f"{copy}.old", copy)
    shown = rows(invoke, copy)["index"]
    assert shown == "lmdb, of another file: the next writer rebuilds it"


def test_a_file_of_another_program(invoke: Invoke, golden: Golden) -> None:
    found = rows(invoke, golden.unpack("small"))
    assert found["record"].startswith("no record matches the header")
    assert found["writer"] == "not recorded; the file is not locked"
    assert "visible" not in found


def _damage(path: Path, offset: int, new: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(new)


@pytest.mark.parametrize(
    "offset, new, what, entries",
    [
        (46, (7).to_bytes(8, "big"), "ends with 7 entries", 200),
        (46, (1 << 60).to_bytes(8, "big"), "counts 1152921504606846976 entries in", 200),
        (38, (1 << 62).to_bytes(8, "big"), "its data ends at byte 4611686018427387904", 200),
        (38, bytes(8), "total length 0 is not possible", 0),
        (4096, b"\x09", "the entries do not match their checksum", 0),
    ],
    ids=["count", "huge count", "huge length", "no length", "first entry"],
)
def test_a_damaged_file(
    invoke: Invoke, copy: Path, offset: int, new: bytes, what: str, entries: int
) -> None:
    _damage(copy, offset, new)
    result = invoke("info", copy, "--json")
    assert what in result.failed()
    (facts,) = result.objects
    assert facts["file_size"] == copy.stat().st_size
    assert sum(facts["entries_by_type"].values()) == entries
    assert "bookmarks" not in facts
    assert (facts["version"], facts["system_id"]) == (1, 137)
    rows(invoke, copy, code=1)
    assert Header.unpack(invoke("info", copy, "--format", "raw").out).version == 1


def test_damage_in_the_middle(invoke: Invoke, copy: Path) -> None:
    entries = scan(copy)
    _damage(copy, copy.read_bytes().index(entries[150].packed), b"\x09")
    result = invoke("info", copy)
    assert "page 0 (entries 0 to 199): the entries do not match" in result.failed()
    assert sum(result.objects[0]["entries_by_type"].values()) == 150
    assert result.objects[0]["total_entries"] == 200


def test_a_file_that_ends_early(invoke: Invoke, copy: Path) -> None:
    os.truncate(copy, 6000)
    result = invoke("info", copy)
    assert "the file ends here, but its data ends at byte" in result.failed()
    assert result.objects[0]["file_size"] == 6000
    whole = sum(result.objects[0]["entries_by_type"].values())
    assert 0 < whole < 200


def test_sources_without_a_header(invoke: Invoke, copy: Path) -> None:
    _damage(copy, 16, b"\x07")
    assert invoke("info", copy).out == b""
    assert "at byte 16: " in invoke("info", copy).failed()


def test_the_header_itself(invoke: Invoke, made: Path, source: str) -> None:
    raw = invoke("info", source, "--format", "raw").out
    assert Header.unpack(raw)._asdict() == header(made)
    assert invoke("info", source, "--format", "hex").out.decode() == f"{raw.hex()}\n"


def test_facts_are_one_line(invoke: Invoke, made: Path) -> None:
    out = invoke("info", made, "--format", "jsonl").out
    assert out.count(b"\n") == 1
    assert json.loads(out)["total_entries"] == 200


def test_the_last_source_of_a_stream(invoke: Invoke, copy: Path) -> None:
    assert "source" not in rows(invoke, copy)
    with DataStream.open(copy, index="memory") as stream:
        stream.parts.writer.put_source(PublisherRecord(7, b"\xab" * 16))
    assert rows(invoke, copy)["source"] == f"epoch 7, id {'ab' * 16}"
    with copy.open("r+b") as file:
        for at in records.SOURCE_OFFSETS:
            file.seek(at)
            file.write(b"x")
    assert rows(invoke, copy)["source"] == "the record is damaged; `datastreamer repair` clears it"
