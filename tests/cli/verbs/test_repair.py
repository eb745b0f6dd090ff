"""`verify` and `repair`: output, exit codes, and files that they do not change."""

from __future__ import annotations

from pathlib import Path

from datastreamer.service.embedded import StreamServer
from datastreamer.storage.stream import DataStream
from tests.cli.conftest import ENTRIES, Invoke
from tests.cli.process import command, on_terminal
from tests.interop.plain import header, scan
from tests.network.stub import Stub, StubServer, handler, sample


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
    result = done.failed()
    assert result.startswith(f"{copy}: 1 problem")
    (report,) = done.objects
    assert report["ok"] is False
    assert report["problems"] == [
        {
            "where": f"byte {at}",
            "what": "packet type 9 is neither an entry (2) nor padding (0); entries 120 to 199 "
            "cannot be read",
            "repair": "repair --from HOST:PORT restores the page from a server of the same stream",
        }
    ]
    table = invoke("verify", copy, "--format", "table").out.decode()
    assert f"byte {at}:" in table
    assert "-> repair --from HOST:PORT restores the page" in table


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
    assert done.failed() == f"{source}: 1 problem, each listed with its repair"
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
    assert (facts["changed"], facts["entries"], facts["entries_cut"]) == (False, 120, 80)
    assert facts["kept"] is None

    done = invoke("repair", copy, "--cut", "--json")
    assert done.code == 0
    (facts,) = done.objects
    assert (facts["changed"], facts["entries"], facts["entries_cut"]) == (True, 120, 80)
    assert Path(facts["kept"]).read_bytes()[:4096] == before[:4096]
    assert header(copy)["total_entries"] == 120
    assert len(scan(copy)) == 120
    assert invoke("verify", copy).code == 0

    (facts,) = invoke("repair", copy, "--json").objects
    assert (facts["healthy"], facts["changed"], facts["kept"]) == (True, False, None)


def test_repair_for_people(invoke: Invoke, copy: Path) -> None:
    text = invoke("repair", copy, "--format", "table").out.decode()
    assert text == f"{copy}: no problems; nothing was changed\n"
    damage(copy, 120)
    text = invoke("repair", copy, "--cut", "--dry-run", "--format", "table").out.decode()
    assert "repair would do this (--dry-run: nothing was changed):" in text
    assert "truncate the stream to 120 entries: 80 entries, 120 to 199, are lost" in text
    assert "ATTENTION: 80 entries at the end of the stream would be removed." in text
    text = invoke("repair", copy, "--cut", "--format", "table").out.decode()
    assert "ATTENTION: 80 entries at the end of the stream were removed." in text
    assert f"the changed part was copied to {copy}." in text
    assert "checked again: no problems, 120 entries" in text


def test_repair_beside_a_writer(invoke: Invoke, copy: Path) -> None:
    with DataStream.open(copy, index="memory"):
        damage(copy, 120)
        assert "locked by another writer" in invoke("repair", copy).failed()
        assert invoke("repair", copy, "--dry-run").code == 0


def test_repair_of_damage_that_cannot_be_repaired(invoke: Invoke, tmp_path: Path) -> None:
    path = tmp_path / "text.bin"
    path.write_bytes(b"no stream at all\n" * 1000)
    for words in (("repair", path), ("repair", path, "--dry-run")):
        result = invoke(*words).failed()
        assert result.startswith(f"{path}: not a stream file: it does not begin with ")
        assert result.endswith("restore from a copy")
    (report,) = invoke("verify", path).objects
    assert [problem["repair"] for problem in report["problems"]] == ["none: restore from a copy"]


def test_at_a_terminal(copy: Path) -> None:
    at = damage(copy, 120)
    code, shown = on_terminal(command("verify", copy.name), copy.parent, columns=60)
    assert code == 1
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
    assert problem["repair"] == "none: restore from a copy"
    assert "dry-run" not in done.failed()


def test_help_names_the_formats(invoke: Invoke) -> None:
    for verb in ("verify", "repair"):
        shown = invoke(verb, "--help").out
        assert b"jsonl" in shown
        assert b"raw" not in shown
