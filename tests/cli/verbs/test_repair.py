"""`verify` and `repair`: output, exit codes, and files that they do not change."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from datastreamer.service.embedded import StreamServer
from datastreamer.storage.header.records import COMMIT, RECORD_OFFSET
from datastreamer.storage.maintain.report import NO_REPAIR
from datastreamer.storage.stream import DataStream
from tests.cli.conftest import ENTRIES, Invoke
from tests.cli.process import command, on_terminal
from tests.interop.plain import header, scan
from tests.network.stub import Stub, StubServer, handler, sample
from tests.ports import free_port


def damage(path: Path, number: int) -> int:
    """Damage entry `number`; returns its offset."""
    at = scan(path)[number].offset
    content = bytearray(path.read_bytes())
    content[at] = 9
    path.write_bytes(content)
    return at


def test_verify_a_whole_file(invoke: Invoke, copy: Path) -> None:
    before = sorted(copy.parent.iterdir())
    done = invoke("verify", copy, "--json")
    assert (done.code, done.err) == (0, "")
    (report,) = done.objects
    assert list(report) == ["ok", "entries", "bookmarks", "pages", "problems", "notes"]
    assert (report["ok"], report["entries"], report["bookmarks"]) == (True, ENTRIES, 80)
    assert sorted(copy.parent.iterdir()) == before
    table = invoke("verify", copy, "--format", "table").out.decode()
    assert table.splitlines()[0] == f"{copy}: no problems"
    assert "entries     200" in table


def test_verify_a_damaged_file(invoke: Invoke, copy: Path) -> None:
    at = damage(copy, 120)
    done = invoke("verify", copy)
    result = done.failed(3)
    assert result.startswith(f"{copy}: 1 problem")
    run = f"run `datastreamer repair {copy} --from HOST:PORT`"
    helps = f"{run}: it restores the page from a server of the same stream"
    (report,) = done.objects
    assert report["ok"] is False
    assert report["problems"] == [
        {
            "where": f"byte {at}",
            "what": "packet type 9 is neither an entry (2) nor padding (0); entries 0 to 199 "
            "cannot be read",
            "repair": helps,
        }
    ]
    assert result.endswith(f"; next: {helps}; add --dry-run to see what it would do")
    table = invoke("verify", copy, "--format", "table").out.decode()
    assert f"byte {at}:" in table
    assert f"-> {helps}" in table


def test_verify_a_server(invoke: Invoke, copy: Path) -> None:
    with StreamServer(copy, host="127.0.0.1", port=0, create=False) as server:
        source = f"127.0.0.1:{server.port}"
        done = invoke("verify", source, "--json")
        assert (done.code, done.err) == (0, "")
        (report,) = done.objects
        assert (report["ok"], report["entries"], report["bookmarks"]) == (True, ENTRIES, 80)
        assert "entries     200" in invoke("verify", source, "--format", "table").out.decode()
        invoke("verify", source, "--stream-type", "2").failed()
    invoke("verify", source).failed()
    assert "is for servers" in invoke("verify", copy, "--stream-type", "1").failed(2)


def test_verify_a_server_with_a_wrong_bookmark(invoke: Invoke) -> None:
    entries = sample(50)
    del entries[30]
    with StubServer(handler(Stub(entries, header_total=50))) as server:
        source = f"127.0.0.1:{server.port}"
        done = invoke("verify", source)
    assert done.failed(3) == f"{source}: 1 problem, each listed with its repair"
    (report,) = done.objects
    assert [problem["where"] for problem in report["problems"]] == ["entry 30"]


def test_verify_has_two_formats(invoke: Invoke, copy: Path) -> None:
    for verb in ("verify", "repair"):
        assert "'raw' is not one of" in invoke(verb, copy, "--format", "raw").failed(2)


def test_no_such_file(invoke: Invoke, tmp_path: Path) -> None:
    for verb in ("verify", "repair"):
        assert "no such file" in invoke(verb, tmp_path / "absent.bin").failed()
        assert "folder" in invoke(verb, tmp_path).failed()


def test_repair_in_steps(invoke: Invoke, copy: Path) -> None:
    damage(copy, 120)
    before = copy.read_bytes()
    (facts,) = invoke("repair", copy, "--cut", "--dry-run", "--json").objects
    assert copy.read_bytes() == before
    assert list(copy.parent.iterdir()) == [copy]
    assert (facts["changed"], facts["entries"], facts["entries_cut"]) == (False, 0, 200)
    assert facts["cut"] == {"first": 0, "last": 199}
    assert facts["kept"] is None

    assert invoke("repair", copy, "--cut").failed() == (
        f"{copy}: this permanently removes 200 entries (0 to 199), from the first damaged page "
        "on; nothing was changed: run it on a terminal, or with --yes"
    )
    done = invoke("repair", copy, "--cut", "--yes", "--json")
    assert done.code == 0
    (facts,) = done.objects
    assert (facts["changed"], facts["entries"], facts["entries_cut"]) == (True, 0, 200)
    assert Path(facts["kept"]).read_bytes()[:4096] == before[:4096]
    assert header(copy)["total_entries"] == 0
    assert invoke("verify", copy).code == 0

    (facts,) = invoke("repair", copy, "--json").objects
    assert (facts["healthy"], facts["changed"], facts["kept"]) == (True, False, None)


def test_repair_for_people(invoke: Invoke, copy: Path) -> None:
    text = invoke("repair", copy, "--format", "table").out.decode()
    assert text == f"{copy}: no problems; nothing was changed\n"
    damage(copy, 120)
    text = invoke("repair", copy, "--cut", "--dry-run", "--format", "table").out.decode()
    assert "repair would do this (--dry-run: nothing was changed):" in text
    assert "truncate the stream to 0 entries: 200 entries, 0 to 199, are lost" in text
    assert "ATTENTION: 200 entries at the end of the stream would be removed." in text
    text = invoke("repair", copy, "--cut", "--yes", "--format", "table").out.decode()
    assert "ATTENTION: 200 entries at the end of the stream were removed." in text
    assert f"the changed part was copied to {copy}." in text
    assert "checked again: no problems, 0 entries" in text


# Without truncation, and from servers.


@pytest.fixture(scope="module")
def paged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A stream of three pages."""
    path = tmp_path_factory.mktemp("paged") / "paged.bin"
    source = random.Random(5)
    with DataStream.create(path, system_id=5, sync="os") as stream:
        while stream.header.total_length < 4096 + (5 << 19):
            with stream.atomic_op() as op:
                op.add_bookmark(stream.total_entries.to_bytes(8, "big"))
                op.add_entry(1, source.randbytes(source.randrange(30_000)))
    return path


@pytest.fixture(scope="module")
def peers(paged: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[str]]:
    """Two servers of it, one of them of a file that another program could have written."""
    folder = tmp_path_factory.mktemp("peers")
    one, two = (Path(shutil.copyfile(paged, folder / f"{n}.bin")) for n in range(2))
    content = bytearray(two.read_bytes())
    content[64:4096] = bytes(4032)
    two.write_bytes(content)
    options: dict[str, Any] = {"host": "127.0.0.1", "port": 0, "in_process": True}
    with StreamServer(one, **options) as first, StreamServer(two, **options) as second:
        yield [f"127.0.0.1:{first.port}", f"127.0.0.1:{second.port}"]


@pytest.fixture
def broken(paged: Path, tmp_path: Path) -> Path:
    """A copy with its checksums and index."""
    shutil.copytree(paged.parent, tmp_path / "copy")
    return tmp_path / "copy" / "paged.bin"


PAGE = 1 << 20
Edit = Callable[[bytearray], object]


def fill(page: int, byte: bytes, size: int = PAGE, at: int = 0) -> Edit:
    start = 4096 + page * PAGE + at
    return lambda content: content.__setitem__(slice(start, start + size), byte * size)


def cut(page: int, at: int) -> Edit:
    return lambda content: content.__delitem__(slice(4096 + page * PAGE + at, None))


EDITS: dict[str, Edit] = {
    "a page of zeros": fill(1, b"\0"),
    "a page of ones": fill(0, b"\xff"),
    "the last page of zeros": fill(2, b"\0"),
    "a byte of data": fill(1, b"!", 1, 5000),
    "a byte of the last page": fill(2, b"!", 1, 5000),
    "a packet type": fill(1, b"\x09", 1),
    "a length": fill(1, b"\xff", 2, 1),
    "a number": fill(1, b"\x01", 1, 9),
    "a torn page": fill(1, b"\0", PAGE // 2, PAGE // 2),
    "two pages": lambda content: (fill(0, b"\0")(content), fill(1, b"\0")(content)),
    "cut in a page": cut(1, 700_000),
    "cut at a page": cut(2, 0),
    "a stale page": lambda content: content.__setitem__(
        slice(4096 + PAGE, 4096 + 2 * PAGE), content[4096 : 4096 + PAGE]
    ),
}


@pytest.mark.parametrize("name", EDITS)
def test_repair_from_a_server(
    invoke: Invoke, paged: Path, broken: Path, peers: list[str], name: str
) -> None:
    content = bytearray(broken.read_bytes())
    EDITS[name](content)
    broken.write_bytes(content)
    assert invoke("verify", broken).code == 3
    done = invoke("repair", broken, "--from", peers[0], "--dry-run", "--json")
    assert (done.code, done.err) == (0, "")
    (planned,) = done.objects
    assert (planned["changed"], planned["entries_lost"]) == (False, 0)
    assert planned["healthy"] is False
    assert broken.read_bytes() == content
    done = invoke("repair", broken, "--from", peers[0], "--json")
    assert done.code == 0
    (facts,) = done.objects
    assert facts["steps"] == planned["steps"]
    assert (facts["changed"], facts["entries_lost"], facts["lost"]) == (True, 0, [])
    assert (facts["healthy"], facts["problems_left"]) == (True, [])
    assert facts["problems"] == planned["problems"] != []
    assert {page["restored_from"] for page in facts["pages"]} == {peers[0]}
    assert invoke("verify", broken).code == 0
    end = header(paged)["total_length"]
    assert broken.read_bytes()[4096:end] == paged.read_bytes()[4096:end]
    (facts,) = invoke("repair", broken, "--from", peers[0], "--json").objects
    assert (facts["healthy"], facts["changed"]) == (True, False)


def test_repair_without_servers_keeps_later_entries(
    invoke: Invoke, paged: Path, broken: Path
) -> None:
    content = bytearray(broken.read_bytes())
    fill(1, b"\0")(content)
    broken.write_bytes(content)
    start, stop = 4096 + PAGE, 4096 + 2 * PAGE
    inside = [entry.number for entry in scan(paged) if start <= entry.offset < stop]
    done = invoke("repair", broken, "--json")
    error = done.failed(3)
    assert f"{len(inside)} entries cannot be read: {inside[0]} to {inside[-1]}; --from" in error
    (facts,) = done.objects
    assert facts["lost"] == [{"first": inside[0], "last": inside[-1]}]
    assert (facts["entries_lost"], facts["entries_cut"]) == (len(inside), 0)
    assert facts["healthy"] is False
    text = invoke("repair", broken, "--format", "table").out.decode()
    assert f"ATTENTION: {len(inside)} entries cannot be read" in text
    assert "- nothing: only damaged pages are left" in text
    assert invoke("verify", broken).code == 3
    assert invoke("entry", broken, inside[-1] + 1).code == 0
    assert "at byte" in invoke("entry", broken, inside[0]).failed()


@pytest.mark.parametrize("name", ["cut in a page", "cut at a page"])
def test_repair_of_a_file_that_is_cut_short(
    invoke: Invoke, paged: Path, broken: Path, name: str
) -> None:
    content = bytearray(broken.read_bytes())
    EDITS[name](content)
    broken.write_bytes(content)
    end = 4096 + PAGE + 700_000 if name == "cut in a page" else 4096 + 2 * PAGE
    advised = invoke("verify", broken, "--json").objects[0]["problems"]
    run = f"run `datastreamer repair {broken} --from HOST:PORT`"
    assert all(problem["repair"].startswith(run) for problem in advised), advised
    entries = scan(paged)
    last = entries[-1].number
    left = sum(1 for entry in entries if entry.offset + 17 + len(entry.data) <= end)
    done = invoke("repair", broken, "--dry-run", "--json")
    lost = f"{broken}: {last + 1 - left} entries ({left} to {last}) "
    helps = "--from HOST:PORT restores them from a server of the same stream"
    assert done.failed(3) == f"{lost}would be lost: the file lacks them; {helps}"
    (planned,) = done.objects
    assert planned["cut"] == {"first": left, "last": last}
    done = invoke("repair", broken, "--json")
    (facts,) = done.objects
    helps = "replace the file by a copy that has them, or let their source write them again"
    assert done.err.splitlines()[-1] == f"error: {lost}are lost: the file lacks them; {helps}"
    assert done.code == 3
    assert facts["steps"] == planned["steps"]
    assert header(broken)["total_entries"] == left
    assert invoke("repair", broken).code == 0


def test_repair_of_what_an_open_truncates_too(invoke: Invoke, tmp_path: Path) -> None:
    """The entries were not known to be on disk: no committed entry is lost."""
    path = tmp_path / "open.bin"
    with DataStream.create(path, index="memory", sync="os") as stream:
        for text in (b"first", b"second"):
            with stream.atomic_op() as op:
                op.add_entry(1, text)
        found = Path(shutil.copyfile(path, tmp_path / "found.bin"))
    content = bytearray(found.read_bytes())
    content[content.index(b"second")] ^= 1
    found.write_bytes(content)
    for words in ((), ("--dry-run",)):
        copy = shutil.copyfile(found, tmp_path / "copy.bin")
        assert invoke("repair", copy, *words).code == 0


def test_the_exit_code_of_a_dry_run(invoke: Invoke, copy: Path) -> None:
    assert invoke("repair", copy, "--dry-run").code == 0
    damage(copy, 120)
    for words, code in (
        ((), 3),
        (("--cut", "--yes"), 0),
        (("--from", f"127.0.0.1:{free_port()}"), 3),
    ):
        planned = invoke("repair", copy, "--dry-run", *words)
        assert planned.code == code, words
        other = shutil.copyfile(copy, copy.with_name("other.bin"))
        assert invoke("repair", other, *words).code == code


def test_repair_of_a_page_without_a_checksum(
    invoke: Invoke, paged: Path, broken: Path, peers: list[str]
) -> None:
    broken.with_name("paged.bin.sums").unlink()
    content = bytearray(broken.read_bytes())
    fill(1, b"\0")(content)
    content[RECORD_OFFSET : RECORD_OFFSET + COMMIT.size] = bytes(COMMIT.size)
    broken.write_bytes(content)
    done = invoke("repair", broken, "--from", peers[0], "--from", peers[0], "--json")
    assert "cannot be read" in done.failed(3)
    (page,) = done.objects[0]["pages"]
    assert page["refused"].startswith(f"only {peers[0]} sends these entries")
    text = invoke("repair", broken, "--from", peers[0], "--format", "table").out.decode()
    assert "refused answers:" in text
    done = invoke("repair", broken, "--from", peers[0], "--from", peers[1], "--json")
    assert done.objects[0]["pages"][0]["restored_from"] == f"{peers[0]} and {peers[1]}"
    assert done.code == 0
    broken.write_bytes(content)
    assert invoke("repair", broken, "--from", peers[1], "--trust-peer").code == 0
    assert invoke("verify", broken).code == 0


def test_repair_from_a_server_that_is_gone_or_another(
    invoke: Invoke, broken: Path, peers: list[str], server: str
) -> None:
    content = bytearray(broken.read_bytes())
    fill(1, b"\0")(content)
    broken.write_bytes(content)
    gone = f"127.0.0.1:{free_port()}"
    done = invoke("repair", broken, "--from", gone, "--from", server, "--json")
    assert "cannot be read" in done.failed(3)
    why = done.objects[0]["pages"][0]["refused"]
    assert gone in why
    assert f"{server}: it serves another stream: system id" in why
    assert broken.read_bytes() == content
    assert invoke("repair", broken, "--from", gone, "--from", peers[0]).code == 0


def test_repair_with_wrong_options(invoke: Invoke, copy: Path) -> None:
    assert "exclude each other" in invoke("repair", copy, "--cut", "--from", "a:1").failed(2)
    assert "requires --from" in invoke("repair", copy, "--trust-peer").failed(2)
    assert "requires --from" in invoke("repair", copy, "--stream-type", 2).failed(2)
    assert "is not HOST:PORT" in invoke("repair", copy, "--from", "no:thing").failed(2)
    assert "is for tcps://" in invoke("repair", copy, "--from", "a:1", "--tls-ca", "x").failed(2)


def test_repair_beside_a_writer(invoke: Invoke, copy: Path) -> None:
    with DataStream.open(copy, index="memory") as stream:
        stream.bookmarks.wait()  # its thread would meet the damage, and log it
        damage(copy, 120)
        assert "locked by another writer" in invoke("repair", copy).failed()
        assert "200 entries cannot be read" in invoke("repair", copy, "--dry-run").failed(3)
        planned = invoke("repair", copy, "--dry-run", "--from", "127.0.0.1:1").failed(3)
        assert "; no server named was asked: first stop the program that writes the f" in planned


def test_repair_of_damage_that_cannot_be_repaired(invoke: Invoke, tmp_path: Path) -> None:
    path = tmp_path / "text.bin"
    path.write_bytes(b"no stream at all\n" * 1000)
    for words in (("repair", path), ("repair", path, "--dry-run")):
        result = invoke(*words).failed()
        assert result.startswith(f"{path}: not a stream file: it does not begin with ")
        assert result.endswith("restore from a copy")
    (report,) = invoke("verify", path).objects
    assert [problem["repair"] for problem in report["problems"]] == [NO_REPAIR]


def test_at_a_terminal(copy: Path) -> None:
    at = damage(copy, 120)
    code, shown = on_terminal(command("verify", copy.name), copy.parent, columns=60)
    assert code == 3
    assert f"byte {at}:" in shown
    assert "error: copy.bin: 1 problem" in shown


def test_entries_after_damage_are_not_stale_bytes(invoke: Invoke, copy: Path) -> None:
    damage(copy, 120)
    (report,) = invoke("verify", copy, "--json").objects
    assert not [note for note in report["notes"] if "no part of the stream" in note]


def test_no_advice_to_repair_what_cannot_be_repaired(invoke: Invoke, tmp_path: Path) -> None:
    path = tmp_path / "text"
    path.write_text("no stream\n" * 1000)
    done = invoke("verify", path, "--json")
    (problem,) = done.objects[0]["problems"]
    assert problem["repair"] == NO_REPAIR
    assert "dry-run" not in done.failed(3)


def test_help_names_the_formats(invoke: Invoke) -> None:
    for verb in ("verify", "repair"):
        shown = invoke(verb, "--help").out
        assert b"jsonl" in shown
        assert b"raw" not in shown
