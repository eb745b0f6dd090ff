"""`demo`: blocks that depend on the seed only, and continue in an existing stream."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from datastreamer.cli.demo import DemoSequencer
from datastreamer.storage.stream import DataStream
from datastreamer.zkevm import decode_data
from datastreamer.zkevm.bookmark_keys import BookmarkName, name_of_key
from datastreamer.zkevm.sequencer import Sequencer as Publisher
from tests.cli.conftest import Invoke
from tests.cli.process import running
from tests.interop.plain import header, scan


def test_what_it_writes(invoke: Invoke, tmp_path: Path) -> None:
    path = tmp_path / "demo.bin"
    demo = invoke("demo", path, "--ops", "3")
    assert (demo.code, demo.out) == (0, b"")
    assert demo.err.startswith("3 of 3 operations, 15 entries, in ")
    assert demo.err.endswith("; " + str(path) + " holds 15 entries\n")
    found = header(path)
    assert (found["version"], found["system_id"], found["stream_type"]) == (1, 137, 1)
    entries = scan(path)
    assert [entry.type for entry in entries] == 3 * [0xB0, 0xB0, 1, 2, 3]
    for block in range(3):
        batch_mark, block_mark, start, transaction, end = entries[5 * block : 5 * block + 5]
        assert name_of_key(1, batch_mark.data) == BookmarkName("batch", block)
        assert name_of_key(1, block_mark.data) == BookmarkName("block", block)
        assert len(start.data) == 122
        assert decode_data(1, start.data, version=1)[:2] == (block, block)
        assert len(end.data) == 72
        assert end.data[:8] == block.to_bytes(8, "big")
        assert int.from_bytes(transaction.data[34:38], "big") == len(transaction.data) - 38
        assert len(list_items(transaction.data[38:])) == 9


def list_items(rlp: bytes) -> list[bytes]:
    """The items of an RLP list of strings, all of it."""

    def head(at: int, kind: int) -> tuple[int, int]:
        size = rlp[at] - kind
        if size < 56:
            return at + 1, size
        digits = size - 55
        return at + 1 + digits, int.from_bytes(rlp[at + 1 : at + 1 + digits], "big")

    at, size = head(0, 0xC0)
    assert at + size == len(rlp)
    items = []
    while at < len(rlp):
        if rlp[at] < 0x80:
            items.append(rlp[at : at + 1])
            at += 1
        else:
            at, size = head(at, 0x80)
            items.append(rlp[at : at + size])
            at += size
    assert at == len(rlp)
    return items


def test_the_same_seed_writes_the_same(invoke: Invoke, tmp_path: Path) -> None:
    for name, parts, seed in [("a", [5], 1), ("b", [2, 0, 3], 1), ("c", [5], 2)]:
        for ops in parts:
            words = ("demo", tmp_path / name, "--ops", ops, "--seed", seed)
            assert invoke(*words).code == 0
    a, b, c = ([entry.data for entry in scan(tmp_path / name)] for name in "abc")
    assert a == b
    assert a != c
    assert len({len(data) for data in a[3::5]}) > 1


def test_continues_after_other_entries(invoke: Invoke, tmp_path: Path) -> None:
    path = tmp_path / "demo.bin"
    assert invoke("demo", path, "--ops", "2").code == 0
    with DataStream.open(path, sync="os") as stream, stream.atomic_op() as op:
        op.add_entries(9, [b""] * 5000)
        op.add_entry(1, b"no StartL2Block")
    assert invoke("demo", path, "--ops", "1").code == 0
    assert name_of_key(1, scan(path)[-4].data) == BookmarkName("block", 2)


@pytest.mark.parametrize(
    "version, types", [(2, [0xB0, 1, 0xB0, 2, 3, 4]), (3, [0xB0, 1, 0xB0, 2, 3, 6, 4])]
)
def test_writes_messages_too(
    invoke: Invoke, tmp_path: Path, version: int, types: list[int]
) -> None:
    path = tmp_path / "demo.bin"
    demo = invoke("demo", path, "--ops", "2", "--stream-version", version)
    assert demo.err.startswith(f"2 of 2 operations, {2 * len(types)} entries, in ")
    assert invoke("demo", path, "--ops", "1").code == 0
    assert [entry.type for entry in scan(path)] == 3 * types
    assert header(path)["version"] == version
    marks = [name_of_key(version, entry.data) for entry in scan(path) if entry.type == 0xB0]
    assert marks[-2:] == [BookmarkName("batch", 2), BookmarkName("block", 2)]
    assert invoke("zkevm", "check", path).code == 0


def test_an_existing_file_brings_its_version(invoke: Invoke, tmp_path: Path) -> None:
    path = tmp_path / "demo.bin"
    DataStream.create(path, version=2, sync="os").close()
    result = invoke("demo", path, "--stream-version", "3").failed()
    assert result.endswith("the stream version of the existing file is 2, not 3")
    assert header(path)["total_entries"] == 0


def test_continues_in_an_open_batch(invoke: Invoke, tmp_path: Path) -> None:
    path = tmp_path / "demo.bin"
    with DataStream.create(path, version=3, sync="os") as stream:
        batch = Publisher(stream).batch()
        batch.__enter__()
        with batch.block(timestamp=1_700_000_000, state_root=bytes(32)):
            pass
    assert invoke("demo", path, "--ops", "2").code == 0
    assert [entry.type for entry in scan(path)] == [
        *(0xB0, 1, 0xB0, 2, 6, 0xB0, 2, 3, 6, 4),
        *(0xB0, 1, 0xB0, 2, 3, 6, 4),
    ]
    assert invoke("zkevm", "check", path).code == 0


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_it_between_operations(
    invoke: Invoke, tmp_path: Path, number: signal.Signals
) -> None:
    assert invoke("demo", tmp_path / "demo.bin", "--ops", "0").code == 0
    words = ("demo", "demo.bin", "--ops", "1000000", "--rate", "200")
    with running(*words, cwd=tmp_path) as writing:
        with running("cat", "demo.bin", "--follow", "--count", "10", cwd=tmp_path) as reading:
            assert reading.wait() == 0
        writing.signal(number)
        assert writing.wait() == 128 + number
        (line,) = writing.err.rest()
    entries = len(scan(tmp_path / "demo.bin"))
    assert entries % 5 == 0
    assert line.endswith(f"demo.bin holds {entries:,} entries")


def test_a_pace(tmp_path: Path, invoke: Invoke) -> None:
    words = ("demo", tmp_path / "demo.bin", "--ops", "5", "--rate", "20")
    text = invoke(*words).err
    assert float(text.split(" in ")[1].split(" s")[0]) >= 0.2


def test_locked(invoke: Invoke, copy: Path) -> None:
    with DataStream.open(copy) as stream:
        assert DemoSequencer(stream).block == 40
        assert "locked by another writer" in invoke("demo", copy).failed()


def test_a_link_in_the_place_of_the_index_is_not_written_through(
    invoke: Invoke, tmp_path: Path
) -> None:
    target = tmp_path / "target"
    target.write_text("another's")
    folder = tmp_path / "demo.bin.index"
    folder.mkdir()
    (folder / "lock.mdb").symlink_to(target)
    assert invoke("demo", tmp_path / "demo.bin", "--ops", "3").failed() == (
        f"{folder}/lock.mdb: is a symbolic link, which is not followed here; the bookmark index is "
        "not used: remove it"
    )
    assert target.read_text() == "another's"
