"""`zkevm check, batch, block, diff` and `cat --decode zkevm`, from files and from servers."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from datastreamer.cli.demo import SYSTEM_ID, DemoSequencer
from datastreamer.service.embedded import StreamServer
from datastreamer.storage.stream import DataStream
from datastreamer.zkevm import Sequencer, encode, events, transactions
from datastreamer.zkevm.events import BookMark, BookmarkType
from tests.cli.conftest import Invoke, archived
from tests.cli.process import command, on_terminal
from tests.zkevm.typed import BLOB, KEY, OTHER, signed_types

BLOCKS = 30
needs_extra = pytest.mark.skipif(
    any(find_spec(name) is None for name in ("rlp", "sha3", "coincurve")),
    reason="the packages of the extra zkevm are not installed",
)


def write(path: Path, version: int, blocks: int = BLOCKS, seed: int = 0) -> Path:
    with DataStream.create(path, version=version, system_id=SYSTEM_ID, sync="os") as stream:
        sequencer = DemoSequencer(stream, seed)
        for _ in range(blocks):
            sequencer.write()
    return path


@pytest.fixture(scope="module", params=[1, 2, 3])
def version(request: pytest.FixtureRequest) -> int:
    return int(request.param)


@pytest.fixture(scope="module")
def path(version: int, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("zkevm") / "made.bin", version)


@pytest.fixture(scope="module")
def served(path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    copy = shutil.copyfile(path, tmp_path_factory.mktemp("served") / "served.bin")
    with StreamServer(copy, host="127.0.0.1", port=0, in_process=True) as serving:
        yield f"127.0.0.1:{serving.port}"


@pytest.fixture(scope="module")
def stored(path: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    return archived(path, tmp_path_factory.mktemp("archive"))


@pytest.fixture(params=["file", "served", "stored"])
def stream(request: pytest.FixtureRequest, path: Path) -> str:
    return str(path) if request.param == "file" else str(request.getfixturevalue(request.param))


@pytest.fixture
def broken(tmp_path: Path) -> Path:
    """A stream of version 3 with a block that cannot be decoded, and a gap."""
    path = write(tmp_path / "broken.bin", 3, blocks=2)
    with DataStream.open(path, sync="os") as stream, stream.atomic_op() as op:
        for event in (BookMark(BookmarkType.BATCH, 7), events.BatchStart(7)):
            kind, data = encode(event, version=3)
            if kind == 0xB0:
                op.add_bookmark(data)
            else:
                op.add_entry(kind, data)
        op.add_bookmark(encode(BookMark(BookmarkType.L2_BLOCK, 2), version=3)[1])
        op.add_entry(2, b"\xff")
        op.add_entry(99, b"of another application")
    return path


# check


def test_check_in_order(invoke: Invoke, stream: str, version: int) -> None:
    check = invoke("zkevm", "check", stream, "--json")
    assert (check.code, check.err) == (0, "")
    (report,) = check.objects
    assert report["ok"] is True
    assert report["version"] == version
    assert report["entries"] == BLOCKS * (4 + version)
    assert (report["batches"], report["blocks"]) == ([0, BLOCKS - 1], [0, BLOCKS - 1])
    assert report["breaches"] == []
    table = invoke("zkevm", "check", stream, "--format", "table")
    assert table.lines[0] == f"{stream}: in order"
    assert f"blocks        0 to {BLOCKS - 1}" in table.lines


def test_check_reports_every_breach(invoke: Invoke, broken: Path) -> None:
    check = invoke("zkevm", "check", broken, "--json")
    assert check.failed(3) == f"{broken}: 3 violations of the order, the first at entry 15"
    (report,) = check.objects
    assert [(breach["entry"], breach["rule"]) for breach in report["breaches"]] == [
        *((15, "batch"), (17, "decode"), (18, "decode"))
    ]
    table = invoke("zkevm", "check", broken, "--format", "table")
    assert table.code == 3
    assert "entry 15, batch:" in table.lines
    assert "  batch 7 begins, but 2 is expected" in table.lines


@pytest.mark.parametrize("held", [0, 1, 7, 10_000])
def test_check_holds_few_breaches(
    held: int, invoke: Invoke, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All breaches are printed, sorted by entry, most of them before the end."""
    # Its package has a function of this name.
    monkeypatch.setattr(import_module("datastreamer.cli.verbs.zkevm.check"), "_HELD", held)
    path = tmp_path / "many.bin"
    with DataStream.create(path, version=3, sync="os") as stream, stream.atomic_op() as op:
        for _ in range(50):
            op.add_entry(2, b"\xff")
    check = invoke("zkevm", "check", path, "--json")
    assert check.failed(3) == f"{path}: 50 violations of the order, the first at entry 0"
    (report,) = check.objects
    assert [breach["entry"] for breach in report["breaches"]] == list(range(50))
    assert (report["ok"], report["broken"], report["first"]) == (False, {"decode": 50}, 0)
    table = invoke("zkevm", "check", path, "--format", "table")
    result = [line for line in table.lines if line.startswith("entry ")]
    assert result == [f"entry {number}, decode:" for number in range(50)]
    assert "broken: decode  50" in table.lines


def test_check_of_an_empty_stream(invoke: Invoke, tmp_path: Path) -> None:
    DataStream.create(tmp_path / "empty.bin", sync="os").close()
    (report,) = invoke("zkevm", "check", tmp_path / "empty.bin").objects
    assert (report["ok"], report["entries"], report["blocks"]) == (True, 0, None)


def test_check_with_another_version(invoke: Invoke, broken: Path) -> None:
    check = invoke("zkevm", "check", broken, "--stream-version", "1")
    assert check.code == 3
    assert check.objects[0]["version"] == 1
    assert "of the order" in check.err


@needs_extra
def test_check_of_the_real_stream(invoke: Invoke, real_stream: Path) -> None:
    check = invoke("zkevm", "check", real_stream)
    assert (check.code, check.err) == (0, "")
    assert check.objects[0]["parents"] == 11_270


# batch and block


@needs_extra
def test_block(invoke: Invoke, stream: str, version: int) -> None:
    shown = invoke("zkevm", "block", stream, 7)
    assert (shown.code, shown.err) == (0, "")
    (block,) = shown.objects
    size = 4 + version
    first = 7 * size + (2 if version > 1 else 1)
    assert block["bookmark"] == first
    assert block["block"]["entry"] == first + 1
    assert block["block"]["kind"] == ("L2Block" if version > 1 else "StartL2Block")
    assert block["block"]["fields"]["number"] == 7
    assert block["block"]["fields"]["batch_number"] == 7
    (transaction,) = block["transactions"]
    assert transaction["entry"] == first + 2
    assert transaction["opened"]["nonce"] == 7
    assert len(transaction["opened"]["hash"]) == 66
    if version == 2:
        assert block["end"] is None
    else:
        assert block["end"]["entry"] == first + 3
        assert block["end"]["fields"]["number"] == 7


@needs_extra
def test_batch(invoke: Invoke, stream: str, version: int) -> None:
    (batch,) = invoke("zkevm", "batch", stream, 7).objects
    assert batch["bookmark"] == 7 * (4 + version)
    (block,) = batch["blocks"]
    assert block == invoke("zkevm", "block", stream, 7).objects[0]
    assert batch["ger_updates"] == []
    if version == 1:
        assert batch["start"] is batch["end"] is None
    else:
        assert batch["start"]["fields"]["number"] == batch["end"]["fields"]["number"] == 7
    last = invoke("zkevm", "batch", stream, BLOCKS - 1).objects[0]
    assert len(last["blocks"]) == 1


@needs_extra
def test_trees(invoke: Invoke, stream: str, version: int) -> None:
    tree = invoke("zkevm", "batch", stream, 3, "--format", "table")
    assert tree.lines[0] == "batch 3"
    (line,) = [line for line in tree.lines if "block 3 of batch 3" in line]
    assert f"entry {3 * (4 + version) + (3 if version > 1 else 2)}" in line
    assert sum(" transaction 0x" in line for line in tree.lines) == 1
    assert any("2023-11-14 22:13:26 UTC, 2 s later" in line for line in tree.lines)
    block = invoke("zkevm", "block", stream, 3, "--format", "table")
    assert block.lines[0].startswith("block 3 of batch 3")


def test_not_opened(invoke: Invoke, stream: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> Any:
        raise ImportError(name)

    monkeypatch.setattr(transactions, "import_module", missing)
    transactions._tools.cache_clear()
    transactions.keccak.cache_clear()
    result = invoke("zkevm", "block", stream, 1).failed()
    assert result.endswith("install it with pip install 'datastreamer[zkevm]'")
    (block,) = invoke("zkevm", "block", stream, 1, "--no-open").objects
    assert "opened" not in block["transactions"][0]
    tree = invoke("zkevm", "block", stream, 1, "--no-open", "--format", "table")
    assert any("bytes: not opened" in line for line in tree.lines)


@needs_extra
def test_typed_transactions(invoke: Invoke, tmp_path: Path, account: Any) -> None:
    signed = signed_types(account)
    path = tmp_path / "typed.bin"
    with DataStream.create(path, version=3, system_id=7, sync="os") as stream:
        sequencer = Sequencer(stream)
        with sequencer.batch() as batch, batch.block(timestamp=1, base_fee=b"\x01\x00") as block:
            for each in signed:
                block.tx(bytes(each.raw_transaction))
    (found,) = invoke("zkevm", "block", path, 0).objects
    assert [entry["opened"]["type"] for entry in found["transactions"]] == [0, 1, 2, 3, 4]
    for entry, each in zip(found["transactions"], signed, strict=True):
        assert entry["opened"]["hash"] == f"0x{bytes(each.hash).hex()}"
        assert entry["opened"]["sender"] == account.from_key(KEY).address.lower()
    lines = invoke("zkevm", "block", path, 0, "--format", "table").lines
    # Long lines are wrapped.
    tree = " ".join(line.strip("│├└─ ") for line in lines)
    assert "base fee 256 wei" in tree
    assert "type 1, nonce 1, value 5, gas 21000, gas price 3, chain 7" in tree
    assert f"accesses {OTHER}" in tree
    assert "max fee per gas 9, max fee per blob gas 4, chain 7" in tree
    assert f"blob {BLOB}" in tree
    assert f"code of {OTHER} for {account.from_key(KEY).address.lower()}" in tree


@needs_extra
def test_invalid_transactions(invoke: Invoke, tmp_path: Path) -> None:
    path = tmp_path / "odd.bin"
    with DataStream.create(path, version=3, sync="os") as stream, stream.atomic_op() as op:
        op.add_bookmark(encode(BookMark(BookmarkType.L2_BLOCK, 1), version=3)[1])
        op.add_entry(*encode(events.L2Block(1, debug="[bold]\n"), version=3))
        op.add_entry(*encode(events.Transaction(1, encoded=b"\xc0"), version=3))
    (block,) = invoke("zkevm", "block", path, 1).objects
    assert block["transactions"][0]["opened"] is None
    assert "a list of 0 items" in block["transactions"][0]["error"]
    tree = invoke("zkevm", "block", path, 1, "--format", "table").lines
    assert any(
        "transaction of 1 bytes: not a transaction: a list of 0 items" in line for line in tree
    )
    assert any("debug '[bold]\\n'" in line for line in tree)


@pytest.mark.parametrize("kind", ["batch", "block"])
def test_unknown_entries_and_bookmarks(invoke: Invoke, stream: str, kind: str) -> None:
    result = invoke("zkevm", kind, stream, BLOCKS).failed()
    assert f"no bookmark {kind}:{BLOCKS} in the stream" in result


def test_a_block_that_cannot_be_read(invoke: Invoke, broken: Path) -> None:
    result = invoke("zkevm", "block", broken, 2).failed()
    assert result.startswith("entry 17: invalid L2Block: at byte 0: ")


def test_a_bookmark_without_a_block(invoke: Invoke, tmp_path: Path) -> None:
    path = tmp_path / "odd.bin"
    with DataStream.create(path, version=3, sync="os") as stream, stream.atomic_op() as op:
        op.add_bookmark(encode(BookMark(BookmarkType.L2_BLOCK, 1), version=3)[1])
        op.add_bookmark(encode(BookMark(BookmarkType.BATCH, 1), version=3)[1])
    result = invoke("zkevm", "block", path, 1).failed()
    assert result == f"{path}: no block follows the bookmark in entry 0"
    (batch,) = invoke("zkevm", "batch", path, 1).objects
    assert (batch["start"], batch["blocks"], batch["end"]) == (None, [], None)
    assert invoke("zkevm", "batch", path, 1, "--format", "table").lines == ["batch"]


@needs_extra
def test_the_real_stream(invoke: Invoke, real_stream: Path) -> None:
    (batch,) = invoke("zkevm", "batch", real_stream, 1).objects
    assert batch["start"]["fields"]["type"] == "INJECTED"
    (transaction,) = batch["blocks"][0]["transactions"]
    assert transaction["opened"]["sender"] is None
    assert batch["end"]["entry"] == 11
    last = invoke("zkevm", "batch", real_stream, 101).objects[0]
    assert last["end"] is None
    blocks = [block["block"]["fields"]["number"] for block in last["blocks"]]
    assert blocks[-1] == 11_317
    assert blocks == list(range(blocks[0], 11_318))
    # Block 0 has no L2BlockEnd: the batch's end is not its own.
    zero = invoke("zkevm", "block", real_stream, 0).objects[0]
    assert zero["end"] is None
    assert "no end yet" in invoke("zkevm", "batch", real_stream, 101, "--format", "table").lines[-1]


@needs_extra
def test_on_a_terminal(path: Path) -> None:
    code, shown = on_terminal(command("zkevm", "block", path, 3), path.parent)
    assert code == 0
    assert shown.startswith("block 3 of batch 3")


# diff


def test_no_difference(invoke: Invoke, path: Path, served: str) -> None:
    for a, b in ((path, path), (path, served), (served, path)):
        diff = invoke("zkevm", "diff", a, b)
        assert (diff.code, diff.err) == (0, "")
        (found,) = diff.objects
        assert found["equal"] is True
        assert found["first_difference"] is None
    assert invoke("zkevm", "diff", path, path, "--format", "table").lines[0].endswith("the same")


def test_the_first_difference(invoke: Invoke, path: Path, version: int, tmp_path: Path) -> None:
    other = Path(shutil.copyfile(path, tmp_path / "other.bin"))
    size = 4 + version
    at = 11 * size + (3 if version > 1 else 2)
    with DataStream.open(other, sync="os") as stream:
        data = bytearray(stream.entry(at).data)
        # The coinbase's last byte: what follows is known.
        place = bytes(data).index(bytes(data)[-26 if version == 1 else -20 :])
        data[place] ^= 1
        stream.update_entry(at, stream.entry(at).type, bytes(data))
    diff = invoke("zkevm", "diff", path, other)
    assert diff.failed() == f"{path} and {other} differ from entry {at} on"
    difference = diff.objects[0]["first_difference"]
    assert (difference["entry"], difference["batch"], difference["block"]) == (at, 11, 11)
    assert difference["fields"] == ["coinbase"]
    assert difference["a"]["fields"]["coinbase"] != difference["b"]["fields"]["coinbase"]
    table = invoke("zkevm", "diff", path, other, "--format", "table").lines
    assert f"entry {at}, batch 11, block 11:" in table
    assert sum("coinbase = 0x" in line for line in table) == 2


def test_one_ends_before_the_other(
    invoke: Invoke, path: Path, version: int, tmp_path: Path
) -> None:
    other = Path(shutil.copyfile(path, tmp_path / "other.bin"))
    total = 20 * (4 + version)
    with DataStream.open(other, sync="os") as stream:
        stream.truncate(total)
    diff = invoke("zkevm", "diff", other, path)
    assert diff.code == 1
    difference = diff.objects[0]["first_difference"]
    assert (difference["entry"], difference["a"]) == (total, None)
    assert difference["b"]["kind"] == "BookMark"
    assert any(
        "no such entry" in line
        for line in invoke("zkevm", "diff", other, path, "--format", "table").lines
    )


def test_headers_differ(invoke: Invoke, tmp_path: Path) -> None:
    for name, system_id in (("a.bin", 1), ("b.bin", 2)):
        DataStream.create(tmp_path / name, system_id=system_id, sync="os").close()
    diff = invoke("zkevm", "diff", tmp_path / "a.bin", tmp_path / "b.bin")
    assert diff.failed().endswith("have the same entries, but their headers differ")
    assert diff.objects[0]["header"] == {"system_id": [1, 2]}


def test_runs_of_other_lengths_are_the_same(
    invoke: Invoke, real_stream: Path, tmp_path: Path
) -> None:
    copy = shutil.copyfile(real_stream, tmp_path / "real.bin")
    with StreamServer(copy, host="127.0.0.1", port=0, in_process=True) as serving:
        diff = invoke("zkevm", "diff", real_stream, f"127.0.0.1:{serving.port}")
    assert diff.objects == [
        {"equal": True, "entries": [34_723] * 2, "header": {}, "first_difference": None}
    ]


# cat --decode zkevm


def test_cat_decodes(invoke: Invoke, stream: str, version: int) -> None:
    cat = invoke("cat", stream, "--decode", "zkevm", "--count", 4 + version)
    plain = invoke("cat", stream, "--count", 4 + version).objects
    kinds = {
        1: ["BookMark", "BookMark", "StartL2Block", "L2Tx", "EndL2Block"],
        2: ["BookMark", "BatchStart", "BookMark", "L2Block", "Transaction", "BatchEnd"],
    }
    kinds[3] = [*kinds[2][:5], "L2BlockEnd", "BatchEnd"]
    assert [entry["kind"] for entry in cat.objects] == kinds[version]
    assert cat.objects[0]["fields"] == {"type": "BATCH", "value": 0}
    for entry, same in zip(cat.objects, plain, strict=True):
        assert {name: entry[name] for name in same} == same
    table = invoke("cat", stream, "--decode", "zkevm", "--count", 2, "--format", "table")
    assert table.lines[0].split() == ["NUMBER", "KIND", "LENGTH", "FIELDS"]
    assert table.lines[1].split()[:2] == ["0", "BookMark"]
    assert table.lines[1].endswith("type=BATCH value=0")


def test_cat_continues_after_entries_that_cannot_be_decoded(invoke: Invoke, broken: Path) -> None:
    cat = invoke("cat", broken, "--decode", "zkevm", "--from", 16)
    mark, bad, unknown = cat.objects
    assert mark["kind"] == "BookMark"
    assert (bad["kind"], bad["fields"]) == ("L2Block", None)
    assert bad["error"].startswith("invalid L2Block: at byte 0: ")
    assert (unknown["kind"], unknown["fields"], "error" in unknown) == (None, None, False)
    assert cat.failed() == f"{broken}: entry 17: {bad['error']}"
    table = invoke("cat", broken, "--decode", "zkevm", "--from", 16, "--format", "table")
    assert table.code == 1
    assert table.lines[2].split()[:2] == ["17", "L2Block"]
    assert table.lines[3].split()[1:3] == ["type", "99"]


def test_decoding_excludes_raw_and_hex(invoke: Invoke, path: Path) -> None:
    result = invoke("cat", path, "--decode", "zkevm", "--format", "raw").failed(2)
    assert "--decode needs table or jsonl" in result


def test_cat_and_diff_with_another_version(invoke: Invoke, tmp_path: Path) -> None:
    """The version in the header may differ from that of the entries."""
    paths = [tmp_path / "a.bin", tmp_path / "b.bin"]
    for path, block in zip(paths, (1, 2), strict=True):
        with (
            DataStream.create(path, version=1, system_id=SYSTEM_ID, sync="os") as stream,
            stream.atomic_op() as op,
        ):
            op.add_bookmark(bytes.fromhex("08021001"))
            op.add_entry(6, bytes([8, block]))
    a, b = paths
    plain = invoke("cat", a, "--decode", "zkevm")
    assert plain.code == 1
    result = invoke(
        *("cat", a, "--decode", "zkevm", "--stream-version", 3, "--from-bookmark", "block:1")
    )
    assert result.code == 0
    assert [(each["kind"], each["fields"]) for each in result.objects] == [
        ("BookMark", {"type": "L2_BLOCK", "value": 1}),
        ("L2BlockEnd", {"number": 1}),
    ]
    (found,) = invoke("zkevm", "diff", a, b, "--stream-version", 3).objects
    assert (found["first_difference"]["block"], found["first_difference"]["fields"]) == (
        1,
        ["number"],
    )
    assert "--stream-version requires --decode" in invoke("cat", a, "--stream-version", 2).failed(2)


def test_the_real_stream_decoded(invoke: Invoke, real_stream: Path) -> None:
    cat = invoke("cat", real_stream, "--decode", "zkevm")
    assert (cat.code, len(cat.lines)) == (0, 34_723)
    last = json.loads(cat.lines[-1])
    assert last["kind"] == "L2BlockEnd"


@pytest.mark.parametrize(
    "words", [("check", "A"), ("block", "A", 1), ("batch", "A", 1), ("diff", "A", "A")]
)
def test_tls_is_for_servers_that_speak_it(
    invoke: Invoke, path: Path, words: tuple[object, ...]
) -> None:
    given = [path if word == "A" else word for word in words]
    result = invoke("zkevm", *given, "--tls-server-name", "x").failed(2)
    assert "--tls-server-name is for tcps://HOST:PORT, not for" in result


def test_help_without_a_verb(invoke: Invoke) -> None:
    result = invoke("zkevm")
    assert result.code == 0
    for verb in ("check", "batch", "block", "diff"):
        assert verb in result.out.decode()


def test_a_difference_in_fields_without_a_name(invoke: Invoke, tmp_path: Path) -> None:
    for name, more in (("a", b""), ("b", b"\xa0\x06\x01")):  # field 100
        with DataStream.create(tmp_path / f"{name}.bin", version=3, sync="os") as stream:
            stream.append(4, b"\x08\x07" + more)
    for pair in (("a.bin", "b.bin"), ("b.bin", "a.bin")):
        places = [tmp_path / name for name in pair]
        [found] = invoke("zkevm", "diff", *places).objects
        assert found["first_difference"]["fields"] == ["unknown"]
        shown = invoke("zkevm", "diff", *places, "--format", "table").out.decode()
        assert "unknown = 0xa00601" in shown
        assert "unknown = None" in shown
