"""`truncate`, `reindex`, `snapshot`, `import-leveldb`: results and errors."""

from __future__ import annotations

import io
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from datastreamer.storage.bookmarks import lmdb_environment as environment
from datastreamer.storage.stream import DataStream
from tests.cli.conftest import ENTRIES, Invoke
from tests.cli.process import command, terminal
from tests.conftest import Golden
from tests.storage.made import BOOKMARK, bookmarks_of, half_update, scan_file, trace_of

BOOKMARKS = 80
WRITING = ["append", "split", "truncate", "reindex", "import-leveldb"]
ALL = [*WRITING, "snapshot"]
MORE = {
    "truncate": ["1", "--yes"],
    "snapshot": ["out.bin"],
    "import-leveldb": ["--db", "folder.db"],
}


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder; standard input is empty."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO()))
    return tmp_path


@pytest.mark.parametrize("verb", ALL)
@pytest.mark.parametrize(
    "name, message",
    [
        ("missing", "missing: no such file"),
        ("folder", "folder: is a folder, not a stream file"),
        ("pipe", "pipe: is a device or a pipe"),
        ("text", "text: not a stream file: it does not begin with polygonDATSTREAM"),
        ("short", "short: not a stream file: the header page is cut"),
        ("cut", "cut: at byte 6000: the file ends here, but its data ends at byte"),
        ("torn", "torn: at byte 16: the header says that the stream ends with 1 entry"),
    ],
)
def test_nothing_to_work_on(
    invoke: Invoke, made: Path, here: Path, verb: str, name: str, message: str
) -> None:
    content = made.read_bytes()
    Path("folder").mkdir()
    os.mkfifo("pipe")
    Path("text").write_text("no stream\n" * 1000)
    Path("short").write_bytes(content[:100])
    Path("cut").write_bytes(content[:6000])
    Path("torn").write_bytes(content[:46] + (1).to_bytes(8, "big") + content[54:])
    before = {path.name for path in here.iterdir()}
    assert message in invoke(verb, name, *MORE.get(verb, [])).failed()
    assert {path.name for path in here.iterdir()} == before


@pytest.mark.parametrize("verb", WRITING)
def test_a_stream_that_is_written(invoke: Invoke, copy: Path, here: Path, verb: str) -> None:
    with DataStream.open(copy):
        failed = invoke(verb, copy, *MORE.get(verb, [])).failed()
    assert f"locked by another writer, process {os.getpid()}" in failed


# truncate


def test_truncate(invoke: Invoke, copy: Path) -> None:
    before = scan_file(copy)
    done = invoke("truncate", copy, 50, "--yes")
    assert (done.code, done.out) == (0, b"")
    assert done.err.startswith(f"{copy} was truncated from 200 to 50 entries, ")
    assert "removed 150 entries from entry 50 on, " in done.err
    assert scan_file(copy) == before[:50]
    with DataStream.open(copy) as stream:
        want = bookmarks_of(before[:50])
        assert {key: stream.bookmark(key) for key in want} == want
        assert len(stream.bookmarks) == len(want)
    again = invoke("truncate", copy, 50)
    assert (again.code, again.err) == (0, f"{copy} already holds 50 entries; nothing was changed\n")
    assert invoke("truncate", copy, 0, "--yes").code == 0
    assert scan_file(copy) == []


@pytest.mark.parametrize("number", [201, 2**64 - 1])
def test_truncate_to_more_entries_than_there_are(invoke: Invoke, copy: Path, number: int) -> None:
    failed = invoke("truncate", copy, number).failed()
    assert failed == f"{copy}: cannot truncate to {number} entries: the stream holds 200"
    assert len(scan_file(copy)) == ENTRIES


def test_truncate_asks_and_refuses(invoke: Invoke, copy: Path, tmp_path: Path) -> None:
    with DataStream.open(copy):
        # Known times, and a writer: what is only planned needs no lock.
        (facts,) = invoke("truncate", copy, 150, "--dry-run", "--json").objects
    removed = scan_file(copy)[150:]
    assert facts["removed_entries"] == len(removed) == 50
    assert facts["removed_bytes"] == sum(len(entry.data) + 17 for entry in removed)
    assert facts["removed_bookmarks"] == sum(entry.type == BOOKMARK for entry in removed) == 20
    before = copy.read_bytes()
    refused = invoke("truncate", copy, 150).failed()
    assert refused.startswith(f"{copy}: this permanently removes 50 entries from entry 150 on, ")
    assert ", among them 20 bookmarks" in refused
    assert refused.endswith("nothing was changed: run it on a terminal, or with --yes")
    for answer, code in (("n", 1), ("", 1), ("y", 0)):
        words = command("truncate", copy.name, "150")
        with terminal(words, tmp_path, dict(os.environ)) as (read_until, write):
            read_until("permanently removes .* 20 bookmarks, ")
            read_until(r"Remove them\? \[y/N\]")
            assert copy.read_bytes() == before
            write(f"{answer}\n")
            read_until("nothing was changed" if code else "was truncated from 200 to 150")
        assert (len(scan_file(copy)) == 150) == (code == 0)


def test_a_snapshot_of_a_server(invoke: Invoke) -> None:
    assert invoke("snapshot", "127.0.0.1:6900", "o.bin").failed() == (
        "127.0.0.1:6900: not a file; to copy a server's stream, run "
        "`datastreamer relay --server 127.0.0.1:6900 --file o.bin`"
    )


def test_commands_say_what_their_options_can_do(invoke: Invoke, copy: Path) -> None:
    """They have no option for the place of the index."""
    Path(f"{copy}.index").write_text("no folder")
    failed = invoke("truncate", copy, 10, "--yes").failed()
    assert f"{copy}.index" in failed
    assert "index='memory'" not in failed


# reindex


@pytest.mark.parametrize("state", ["none", "whole", "damaged", "another's"])
def test_reindex(invoke: Invoke, copy: Path, state: str) -> None:
    folder = Path(f"{copy}.index")
    if state != "none":
        DataStream.open(copy).close()
        assert (folder / "data.mdb").exists()
    if state == "damaged":
        (folder / "data.mdb").write_bytes(b"no LMDB" * 1000)
    if state == "another's":
        shutil.copy(copy, f"{copy}.old")
        os.replace(f"{copy}.old", copy)
        with DataStream.open(copy, index="memory") as stream:
            stream.truncate(100)
    entries = scan_file(copy)
    want = bookmarks_of(entries)
    done = invoke("reindex", copy)
    assert (done.code, done.out) == (0, b"")
    said = f"{copy}: indexed {len(want)} different bookmarks of {len(entries)} entries"
    assert done.err.splitlines()[-1] == said
    with DataStream.open(copy, read_only=True) as stream:
        assert stream.bookmarks.lag() == 0
        assert {key: stream.bookmark(key) for key in want} == want


@pytest.mark.parametrize("verb", ["reindex", "repair"])
def test_the_old_index_is_not_opened(
    invoke: Invoke, copy: Path, verb: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """LMDB may end a process that writes into a damaged one."""
    DataStream.open(copy).close()
    if verb == "repair":
        with open(copy, "r+b") as file:
            file.truncate(copy.stat().st_size - 1)
    data = Path(f"{copy}.index") / "data.mdb"
    old = data.stat().st_ino
    written: list[int] = []
    make = environment._environment

    def made(folder: str, write: bool, lock: bool) -> object:
        if write:
            written.append(data.stat().st_ino if data.exists() else 0)
        return make(folder, write, lock)

    with open(data, "rb"):  # so that its number is not given again
        monkeypatch.setattr(environment, "_environment", made)
        invoke(verb, copy)
    assert written
    assert old not in written


def test_reindex_where_no_index_can_be_created(invoke: Invoke, copy: Path) -> None:
    Path(f"{copy}.index").write_text("in the way")
    failed = invoke("reindex", copy).failed()
    assert failed == f"{copy}.index: is in the place of the bookmark index; move it elsewhere"


def test_reindex_of_a_damaged_stream(invoke: Invoke, copy: Path) -> None:
    content = bytearray(copy.read_bytes())
    at = scan_file(copy)[100].offset
    content[at] = 9
    copy.write_bytes(content)
    failed = invoke("reindex", copy).err.splitlines()[-1]
    assert f"{copy}: at byte 4096: page 0 (entries 0 to 199): the entries do not match" in failed


@pytest.mark.parametrize("verb", ["reindex", "import-leveldb"])
def test_the_index_of_a_damaged_stream_is_kept(invoke: Invoke, copy: Path, verb: str) -> None:
    """A new index would lack the bookmarks that cannot be read."""
    DataStream.open(copy).close()
    entry = next(it for it in scan_file(copy) if it.type == BOOKMARK)
    with copy.open("r+b") as file:
        file.seek(entry.offset + 17)
        file.write(bytes([entry.data[0] ^ 1]))
    index = Path(f"{copy}.index")
    before = trace_of(index)
    failed = invoke(verb, copy).failed()
    assert "page 0 (entries 0 to 199): the entries do not match their checksum; the " in failed
    assert f"run `datastreamer repair {copy} --from HOST:PORT` first, or remove {index} " in failed
    assert trace_of(index) == before
    shutil.rmtree(index)
    assert "do not match their checksum" in invoke("reindex", copy).err.splitlines()[-1]


def test_reindex_after_half_an_update(invoke: Invoke, copy: Path) -> None:
    """The open for writing undoes it."""
    DataStream.open(copy).close()
    entries = [it for it in scan_file(copy) if it.type != BOOKMARK]
    entry = next(it for it in entries if len(it.data) > 512 - (it.offset + 17) % 512)
    new = bytes(byte ^ 255 for byte in entry.data)
    half_update(copy, entry.offset + 17, entry.data, new)
    assert invoke("reindex", copy).code == 0
    assert scan_file(copy)[entry.number] == entry


# snapshot


def test_snapshot(invoke: Invoke, copy: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.bin"
    with DataStream.open(copy) as stream, stream.atomic_op() as op:
        op.add_entry(1, b"not committed")
        before = trace_of(tmp_path)
        done = invoke("snapshot", copy, out)
        assert (done.code, done.out) == (0, b"")
        assert f"{out} holds 200 entries, " in done.err
        assert " in a file of 1,052,672 bytes" in done.err
        left = {path for path in tmp_path.iterdir() if path.name.startswith("out")}
        assert left == {out}
        after = trace_of(tmp_path)
        del after[str(out)]
        # The folder itself has one more link.
        assert after.keys() == before.keys()
        assert after[str(copy)] == before[str(copy)]
    assert scan_file(out) == scan_file(copy)[:ENTRIES]
    assert invoke("info", out).objects[0]["bookmarks"] == BOOKMARKS


def test_snapshot_to_an_existing_path(invoke: Invoke, made: Path, here: Path) -> None:
    Path("out.bin").write_text("valuable")
    Path("folder").mkdir()
    Path("dangling").symlink_to("nowhere")
    for name in ("out.bin", "folder", "dangling", made):
        failed = invoke("snapshot", made, name).failed()
        assert failed == f"{name}: exists already; choose another path"
    assert Path("out.bin").read_text() == "valuable"
    assert invoke("snapshot", made, "no/out.bin").failed() == "no/out.bin: no such folder"


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A folder on a disk of 3 MiB."""
    folder = tmp_path / "small"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", str(folder)]
    if os.geteuid() or subprocess.run(mount, check=False, capture_output=True).returncode:
        pytest.skip("mounting a small disk needs more rights than there are here")
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def test_snapshot_to_a_full_disk(invoke: Invoke, small_disk: Path, tmp_path: Path) -> None:
    with DataStream.create(tmp_path / "big.bin", sync="os") as stream, stream.atomic_op() as op:
        op.add_entries(1, [bytes(1 << 19)] * 10)
    failed = invoke("snapshot", tmp_path / "big.bin", small_disk / "out.bin").failed()
    assert failed.endswith("out.bin: the snapshot cannot be made: No space left on device")
    assert list(small_disk.iterdir()) == []


# import-leveldb


def imported(invoke: Invoke, golden: Golden, name: str, kind: str = "db") -> tuple[list[str], str]:
    pytest.importorskip("plyvel")
    path = golden.unpack(name)
    folder = golden.database(name, kind)
    before = trace_of(folder)
    done = invoke("import-leveldb", path, "--db", folder, "--json")
    assert done.code == 0, done
    assert trace_of(folder) == before
    # The index is the scan.
    want = bookmarks_of(scan_file(path))
    with DataStream.open(path, read_only=True) as stream:
        assert stream.bookmarks.lag() == 0
        assert len(stream.bookmarks) == len(want)
        assert {key: stream.bookmark(key) for key in want} == want
    return done.lines, done.err


NAMES = [
    *("boundary", "crashed", "duplicates", "empty", "pages"),
    *("rollback", "small", "truncated", "unindexed", "updated"),
]


@pytest.mark.parametrize("name", NAMES)
def test_import(invoke: Invoke, golden: Golden, name: str) -> None:
    lines, said = imported(invoke, golden, name)
    manifest = golden.manifest(name)
    theirs, scan = manifest["bookmarks_leveldb"], manifest["bookmarks_scan"]
    ours = {key: number for key, number in scan.items() if 2 <= len(key) <= 32}
    found = [json.loads(line) for line in lines]
    wrong = {key: number for key, number in theirs.items() if ours.get(key) != number}
    assert {it["key"][2:]: it["database"] for it in found if it["database"] is not None} == wrong
    lacking = {key: number for key, number in ours.items() if key not in theirs}
    assert {it["key"][2:]: it["file"] for it in found if it["database"] is None} == lacking
    for it in found:
        assert it["file"] == ours.get(it["key"][2:])
    assert len(found) == len(wrong) + len(lacking)
    assert f"{len(theirs) - len(wrong)} bookmarks match the stream" in said
    assert f"{len(wrong)} are stale, {len(lacking)} are missing" in said
    assert said.rstrip().endswith(f"has {len(ours)}")


@pytest.mark.parametrize("name", ["small", "duplicates"])
def test_import_from_tables(invoke: Invoke, golden: Golden, name: str) -> None:
    assert imported(invoke, golden, name, "db-table") == imported(invoke, golden, name)


def test_import_prints_what_the_database_has(invoke: Invoke, golden: Golden) -> None:
    lines, _ = imported(invoke, golden, "rollback")
    assert [(it["key"], it["why"]) for it in map(json.loads, lines)] == [
        ("0xaa01", "entry 4 has type 1"),
        ("0xbb01", "entry 3 has type 3"),
        ("0xcc01", "entry 6 is the bookmark 0xdd01"),
        ("0xdd01", "the stream ends with entry 8"),
        ("0xee01", "entry 8 has type 5"),
        ("0xff01", "the stream ends with entry 8"),
    ]
    lines, _ = imported(invoke, golden, "unindexed")
    assert [(it["key"], it["why"]) for it in map(json.loads, lines)] == [
        ("0x3001", "entry 4 is newer"),
        ("0x3002", "missing in the database"),
    ]
    lines, _ = imported(invoke, golden, "duplicates")
    assert [it["why"] for it in map(json.loads, lines)] == [
        f"a key of {size} bytes cannot be looked up and is not indexed" for size in (0, 32, 17)
    ]


def test_import_finds_the_database_by_the_name_of_the_file(
    invoke: Invoke, golden: Golden, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The Go program names the database by the path up to its first dot."""
    pytest.importorskip("plyvel")
    golden.unpack("unindexed")
    monkeypatch.chdir(golden.scratch)
    missing = invoke("import-leveldb", "unindexed.bin").failed()
    assert missing == "unindexed.db: no such folder; name the database with --db"
    golden.database("unindexed")
    shown = invoke("import-leveldb", "unindexed.bin", "--format", "table").lines
    assert shown[0].split() == ["DATABASE", "FILE", "KEY,", "AND", "WHY"]
    assert shown[1].split()[:3] == ["0", "4", "0x3001:"]
    assert shown[2].split()[:3] == ["-", "2", "0x3002:"]
    assert len(shown) == 3


def test_import_without_the_package(
    invoke: Invoke, copy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "plyvel", None)
    failed = invoke("import-leveldb", copy, "--db", tmp_path).failed()
    assert failed == f"{tmp_path}: reading it needs plyvel: pip install 'datastreamer[leveldb]'"


# damage


def zeros_from(path: Path, number: int) -> int:
    """Write zeros from entry `number` on; returns its offset."""
    at = scan_file(path)[number].offset
    content = path.read_bytes()
    path.write_bytes(content[:at].ljust(len(content), b"\0"))
    return at


@pytest.mark.parametrize(
    "verb, more", [("truncate", [150, "--yes"]), ("reindex", []), ("snapshot", ["out.bin"])]
)
def test_damage_is_reported_once_with_advice(
    invoke: Invoke, copy: Path, here: Path, verb: str, more: list[object]
) -> None:
    DataStream.open(copy).close()
    shutil.rmtree(f"{copy}.index")
    zeros_from(copy, 100)
    done = invoke(verb, copy, *more)
    assert done.code == 1
    # An open for writing logs that the last page is damaged.
    *logged, failed = done.err.splitlines()
    assert len(logged) == (verb != "snapshot")
    assert all("the last page, do not match their checksum" in line for line in logged)
    assert failed.startswith(f"error: {copy}: at byte ")
    assert failed.endswith(f"; `datastreamer verify {copy}` lists all damage")
    assert "try again" not in failed
    assert not Path("out.bin").exists()


def test_a_damaged_end_is_reported_once(invoke: Invoke, copy: Path) -> None:
    for _ in range(2):
        DataStream.open(copy).close()
    content = bytearray(copy.read_bytes())
    content[46:54] = (1).to_bytes(8, "big")
    copy.write_bytes(content)
    assert invoke("info", copy).failed().count("entry 200 at byte") == 1
