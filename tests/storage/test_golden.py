"""Files of the reference implementation: read, and made again through our own API."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pytest

from datastreamer import DataStream
from datastreamer.errors import OperationOpen, UnknownBookmark, UnknownEntry, UpdateRefused
from tests.conftest import Golden, make_data
from tests.storage.made import BOOKMARK, FIRST, PAGE, digest, header_of

NAMES = [
    "boundary",
    "crashed",
    "duplicates",
    "empty",
    "pages",
    "rollback",
    "small",
    "truncated",
    "unindexed",
    "updated",
]
# What our API refuses to write: keys of 0, 17 and 40 bytes; bookmarks as plain events; and
# a process that ends inside an operation.
NOT_OURS = {"duplicates", "unindexed", "crashed"}
MODES: list[dict[str, Any]] = [{"read_only": True}, {"follow": True}, {"index": "memory"}, {}]


def test_the_list_is_all_there_is(golden: Golden) -> None:
    assert golden.names() == NAMES


@pytest.mark.parametrize("mode", MODES, ids=["read_only", "follow", "write, memory", "write"])
@pytest.mark.parametrize("name", NAMES)
def test_read(golden: Golden, name: str, mode: dict[str, Any]) -> None:
    path, manifest, lines = golden.unpack(name), golden.manifest(name), golden.entries(name)
    want = manifest["header"]
    with DataStream.open(path, **mode) as stream:
        assert stream.header.pack().hex() == manifest["header_hex"]
        assert stream.header == (
            want["version"],
            want["system_id"],
            want["stream_type"],
            want["total_length"],
            want["total_entries"],
        )
        assert digest(b.packed() for b in stream.batches()) == manifest["file"]["sha256_entries"]
        entries = list(stream.entries())
        assert len(entries) == len(lines)
        for entry, line in zip(entries, lines, strict=True):
            assert (entry.number, entry.type) == (line["number"], line["type"])
            assert len(entry.data) + 17 == line["length"]
            assert hashlib.sha256(entry.data).hexdigest()[:16] == line["sha256"]
            assert stream.entry(entry.number) == entry
            assert stream.reader.cursor(entry.number) == (line["offset"], line["number"])
        for key, number in manifest["bookmarks_scan"].items():
            if 1 <= len(bytes.fromhex(key)) <= 16:
                assert stream.bookmark(bytes.fromhex(key)) == number
        for key in manifest["bookmarks_leveldb"].keys() - manifest["bookmarks_scan"].keys():
            # The reference's index names entries that are not in the stream.
            with pytest.raises(UnknownBookmark):
                stream.bookmark(bytes.fromhex(key))


@pytest.mark.parametrize("name", NAMES)
def test_first_events(golden: Golden, name: str) -> None:
    entries = golden.entries(name)
    with DataStream.open(golden.unpack(name), read_only=True) as stream:
        for key, number in golden.manifest(name)["bookmarks_scan"].items():
            if not 1 <= len(bytes.fromhex(key)) <= 16:
                continue
            events = [e for e in entries[number:] if e["type"] != BOOKMARK]
            if events:
                found = stream.first_event_after_bookmark(bytes.fromhex(key))
                assert (found.number, found.type) == (events[0]["number"], events[0]["type"])
            else:
                with pytest.raises(UnknownBookmark, match="no event follows"):
                    stream.first_event_after_bookmark(bytes.fromhex(key))


@pytest.mark.parametrize("name", NAMES)
def test_appended_to(golden: Golden, name: str) -> None:
    """A file of the reference continues under our writer; its old content stays."""
    path, manifest = golden.unpack(name), golden.manifest(name)
    total = manifest["header"]["total_entries"]
    with DataStream.open(path) as stream, stream.atomic_op() as op:
        assert op.add_bookmark(b"ours") == total
        assert op.add_entry(9, b"new") == total + 1
    with DataStream.open(path, read_only=True) as stream:
        packed = b"".join(batch.packed() for batch in stream.batches(0, total))
        assert hashlib.sha256(packed).hexdigest() == manifest["file"]["sha256_entries"]
        assert stream.bookmark(b"ours") == total
        assert stream.first_event_after_bookmark(b"ours").data == b"new"
    size = path.stat().st_size
    assert size >= header_of(path)[-2] + 1
    assert (size - FIRST) % PAGE == 0


@pytest.mark.parametrize("sync", ["commit", "os"])
@pytest.mark.parametrize("name", [name for name in NAMES if name not in NOT_OURS])
def test_made_again(golden: Golden, tmp_path: Path, name: str, sync: Any) -> None:
    manifest = golden.manifest(name)
    path = tmp_path / "ours.bin"
    by_hand: list[tuple[int, bytes]] = []
    with DataStream.create(path, sync=sync, index="memory", **manifest["create"]) as stream:
        for step in manifest["operations"]:
            replay(stream, step, by_hand)
        bookmarks = {
            bytes.fromhex(key): number for key, number in manifest["bookmarks_scan"].items()
        }
        for at, data in by_hand:
            # The one step that we refuse: the bookmark keeps its key.
            bookmarks = {key: n for key, n in bookmarks.items() if n != at}
            bookmarks[stream.entry(at).data] = at
            assert len(stream.entry(at).data) == len(data)
        assert {key: stream.bookmark(key) for key in bookmarks} == bookmarks
        assert len(stream.bookmarks) == len(bookmarks)
        offsets = [(stream.reader.cursor(at).offset + 17, data) for at, data in by_hand]
    content = bytearray(path.read_bytes())
    for offset, data in offsets:
        content[offset : offset + len(data)] = data
    committed = content[: manifest["header"]["total_length"]]
    assert committed[16:54].hex() == manifest["header_hex"]
    for page in manifest["pages"]:
        if page["padding"]:
            start, end = page["padding"]
            assert committed[start] == 0
            committed[start:end] = bytes(end - start)
    committed[54:FIRST] = bytes(FIRST - 54)  # our own records
    sums = manifest["file"]
    assert hashlib.sha256(committed).hexdigest() == sums["sha256_committed_padding_zeroed"]


def replay(stream: DataStream, step: dict[str, Any], by_hand: list[tuple[int, bytes]]) -> None:
    """One step of a recipe, with the result that it has there, or our error for its error."""
    error = step.get("result", {}).get("error")
    match step["op"]:
        case "start_op":
            stream.start_atomic_op()
        case "commit":
            stream.commit_atomic_op()
        case "rollback":
            stream.rollback_atomic_op()
        case "bookmark":
            assert stream.add_bookmark(make_data(step["data"])) == step["result"]["number"]
        case "entry":
            number = stream.add_entry(step["type"], make_data(step["data"]))
            assert number == step["result"]["number"]
        case "truncate":
            if error is None:
                stream.truncate(step["entry"])
                return
            ours = {
                "invalid entry number, doesn't exist": UnknownEntry,
                "truncate not allowed, atomic operation in progress": OperationOpen,
            }
            with pytest.raises(ours[error]):
                stream.truncate(step["entry"])
        case "update":
            replay_update(stream, step, error, by_hand)
        case other:
            raise AssertionError(f"a step that this test does not know: {other}")


def replay_update(
    stream: DataStream, step: dict[str, Any], error: str | None, by_hand: list[tuple[int, bytes]]
) -> None:
    number, kind, data = step["entry"], step["type"], make_data(step["data"])
    if stream._op.is_open:
        # The reference updates while an operation is open, we do not. What it refuses for
        # other reasons we refuse for this one; what it does is done after the commit, and
        # the file is the same.
        with pytest.raises(OperationOpen):
            stream.update_entry(number, kind, data)
        if error is None:
            stream.commit_atomic_op()
            stream.update_entry(number, kind, data)
            stream.start_atomic_op()
        return
    if error is None and kind == BOOKMARK:
        # The reference updates bookmarks and forgets its index; we refuse to.
        with pytest.raises(UpdateRefused, match="bookmark"):
            stream.update_entry(number, kind, data)
        by_hand.append((number, data))
        return
    if error is None:
        stream.update_entry(number, kind, data)
        assert stream.entry(number).data == data
        return
    ours = {
        "update entry to a different entry type not allowed": UpdateRefused,
        "update entry to a different size not allowed": UpdateRefused,
        "invalid entry number, doesn't exist": UnknownEntry,
    }
    with pytest.raises(ours[error]):
        stream.update_entry(number, kind, data)


def test_every_refusal_of_an_update_is_in_the_recipe(golden: Golden) -> None:
    steps = golden.manifest("updated")["operations"]
    assert sum(s["op"] == "update" and s["type"] == BOOKMARK for s in steps) == 2
    assert sum("error" in s.get("result", {}) for s in steps if s["op"] == "update") == 10
