"""What a writer publishes: rows, generations, terms, and who may publish after whom."""

from __future__ import annotations

import dataclasses
import shutil
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from datastreamer.archive.archived_file import ArchivedFile
from datastreamer.archive.check import prunable, prune
from datastreamer.archive.restore import restore
from datastreamer.archive.writer import ArchiveWriter
from datastreamer.errors import (
    ArchiveBusy,
    ArchiveDiverged,
    ArchiveFenced,
    ArchiveMissing,
    ArchiveUnreachable,
    ArchiveUnsafe,
    BadArgument,
    DamagedArchive,
    DamagedEntry,
    IndexFailed,
    NotAnArchive,
    StreamBusy,
)
from datastreamer.format import HEADER_PAGE_SIZE, page_start
from datastreamer.storage.bookmarks.builder import IndexBuilder
from datastreamer.storage.bookmarks.lmdb import LmdbIndex
from datastreamer.storage.objects.manifest import ArchiveManifest
from datastreamer.storage.objects.opened import RESTORED_EPOCHS, OpenArchive
from datastreamer.storage.objects.store import Store
from datastreamer.storage.stream import DataStream
from tests.archive.stores import (
    MemoryStore,
    ensure_whole,
    fill,
    opened,
    push,
    writer_of,
)


def rows_of(memory: MemoryStore) -> list[tuple[int, int, int]]:
    """First page, pages and frame of each row."""
    return [(row.first_page, row.pages, row.frame) for row in newest(memory).rows]


def newest(memory: MemoryStore) -> ArchiveManifest:
    return opened(memory).newest()[0]


def ensure_restored(memory: MemoryStore, path: Path, out: Path) -> None:
    """A restored file has the stream's bytes, checksums and bookmarks."""
    archive = opened(memory)
    manifest = archive.newest()[0]
    restore(archive, out, manifest)
    with (
        DataStream.open(out, read_only=True, verify="always") as restored,
        DataStream.open(path, read_only=True) as stream,
    ):
        assert restored.header == stream.header
        assert restored.stream_id == stream.stream_id
        assert len(restored.bookmarks) == len(stream.bookmarks)
        for batch, other in zip(restored.batches(), stream.batches(), strict=True):
            assert batch.packed() == other.packed()
            for key, _ in batch.bookmarks():
                assert restored.bookmark(key) == stream.bookmark(key)


def test_an_archive_grows_with_its_stream(tmp_path: Path) -> None:
    path, memory = tmp_path / "s.bin", MemoryStore()
    with DataStream.create(path) as stream:
        assert push(path, memory)
        assert (rows_of(memory), newest(memory).head.entries) == ([], 0)
        fill(stream, 0.4)
        assert push(path, memory)
        assert not push(path, memory)
        assert rows_of(memory) == [(0, 1, 0)]
        fill(stream, 2)
        push(path, memory)
        assert rows_of(memory) == [(0, 2, 0), (2, 1, 0)]
        fill(stream, 1)
        push(path, memory)
        assert rows_of(memory) == [(0, 2, 0), (2, 1, 0), (3, 1, 0)]
        fill(stream, 7)
        push(path, memory)
        # Pieces that fill a segment became one.
        assert [pages for _, pages, _ in rows_of(memory)][:2] == [4, 4]
        assert newest(memory).generation == 1
        assert ensure_whole(memory, path) == stream.total_entries
    ensure_restored(memory, path, tmp_path / "r.bin")


def test_changes_make_a_generation_that_shares_objects(tmp_path: Path) -> None:
    path, memory = tmp_path / "s.bin", MemoryStore()
    with DataStream.create(path) as stream:
        fill(stream, 9.5)
        push(path, memory)
        number = 40
        entry = stream.entry(number)
        while entry.type != 2:
            number += 1
            entry = stream.entry(number)
        stream.update_entry(number, 2, bytes(len(entry.data)))
        put = len(memory.objects)
        push(path, memory)
        assert (newest(memory).generation, newest(memory).reason) == (
            2,
            f"update at entry {number}",
        )
        assert len(memory.objects) == put + 3  # the page, the tail, the manifest
        assert sorted(pages for _, pages, _ in rows_of(memory))[-2:] in ([3, 4], [2, 4])
        ensure_whole(memory, path)
        stream.truncate(number + 2)
        fill(stream, 0.2, seed=5)
        push(path, memory)
        assert newest(memory).reason == f"truncation at entry {number + 2}"
        assert newest(memory).generation == 3
        assert ensure_whole(memory, path) == stream.total_entries
        assert [each.generation for each in opened(memory).generations()] == [3, 2, 1]
        first = opened(memory).chosen(generation=1)
    restore(opened(memory), tmp_path / "first.bin", first)
    with DataStream.open(tmp_path / "first.bin", read_only=True) as old:
        assert old.entry(number).data == entry.data
        assert old.total_entries == first.head.entries
    ensure_restored(memory, path, tmp_path / "r.bin")


def test_bookmarks_of_a_part_of_an_object(tmp_path: Path) -> None:
    """The newest bookmark with a key was truncated, an older one is in the part that stays."""
    path, memory = tmp_path / "s.bin", MemoryStore()
    with DataStream.create(path) as stream:
        for number in range(60):
            with stream.atomic_op() as op:
                op.add_bookmark(b"same")
                op.add_entry(2, bytes([number]) * 100_000)
        push(path, memory, pages=16)
        assert opened(memory).bookmark(newest(memory), b"same") == 118
        stream.truncate(61)
        push(path, memory, pages=16)
        assert opened(memory).bookmark(newest(memory), b"same") == 60
        assert opened(memory).bookmark(newest(memory), b"none") is None


def test_an_old_writer_is_fenced(tmp_path: Path) -> None:
    path, memory = tmp_path / "s.bin", MemoryStore()
    with DataStream.create(path) as stream:
        fill(stream, 1.5)
        old, new = writer_of(path, memory), writer_of(path, memory)
        assert old.publish()
        fill(stream, 1)
        assert new.publish()
        fill(stream, 1)
        with pytest.raises(ArchiveFenced, match=r"has published manifest 2 of the archive"):
            old.publish()
        with pytest.raises(ArchiveFenced):
            old.publish()
        assert new.publish()
        assert newest(memory).writer.term == 2
        for each in (old, new):
            each.source.close()
        ensure_whole(memory, path)


def test_another_file(tmp_path: Path) -> None:
    """A file with another history, or another stream, is not archived over the first one."""
    path, other, memory = tmp_path / "s.bin", tmp_path / "o.bin", MemoryStore()
    with DataStream.create(path) as stream:
        fill(stream, 2)
    push(path, memory)
    with DataStream.create(other) as stream:
        fill(stream, 2, seed=1)
    with pytest.raises(ArchiveBusy, match=r"another stream file was archived there \d+ s ago"):
        push(other, memory)
    before = dict(memory.objects)
    for number in (1,):
        manifest = opened(memory).manifest(number)[0]
        aged = dataclasses.replace(manifest, time=manifest.time - 10**8)
        memory.objects["m/0000000000000001.json.zst"] = aged.pack(), before["stream.json"][1]
    with pytest.raises(ArchiveDiverged, match="other entries than the file"):
        push(other, memory)
    assert push(other, memory, takeover=True)
    assert newest(memory).reason == "takeover"
    ensure_whole(memory, other)
    third = tmp_path / "t.bin"
    DataStream.create(third, system_id=5).close()
    with pytest.raises(ArchiveDiverged, match="of system 0 and type 1"):
        push(third, memory, takeover=True)


def test_a_copy_that_went_on_otherwise(tmp_path: Path) -> None:
    """The copy has the stream's id and epoch."""
    path, copy, memory = tmp_path / "s.bin", tmp_path / "c.bin", MemoryStore()
    with DataStream.create(path) as stream:
        fill(stream, 2)
    shutil.copy(path, copy)
    for each, seed in ((path, 1), (copy, 2)):
        with DataStream.open(each) as stream:
            fill(stream, 1, seed=seed)
    push(path, memory)
    with pytest.raises(ArchiveDiverged):
        push(copy, memory)
    with DataStream.open(copy) as stream:
        stream.truncate(1)
    # It says which entries were truncated: those that the archive has.
    push(copy, memory)
    ensure_whole(memory, copy)


def test_a_damaged_page_is_not_archived(tmp_path: Path) -> None:
    path, memory = tmp_path / "s.bin", MemoryStore()
    with DataStream.create(path) as stream:
        fill(stream, 3)
    with path.open("r+b") as file:
        file.seek(page_start(1) + 5000)
        file.write(b"damage")
    with pytest.raises(DamagedEntry, match="page 1"):
        push(path, memory)
    assert [name for name in memory.objects if name.startswith("m/")] == []


def test_only_what_is_durable_is_archived(tmp_path: Path) -> None:
    path, memory = tmp_path / "s.bin", MemoryStore()
    with DataStream.create(path, sync="os") as stream:
        fill(stream, 0.5)
        stream.sync()
        durable = stream.total_entries
        fill(stream, 0.1)
        push(path, memory)
        assert durable <= newest(memory).head.entries <= stream.total_entries
        record = newest(memory).head.entries
        stream.sync()
        push(path, memory)
        assert record <= newest(memory).head.entries <= stream.total_entries
    push(path, memory)
    assert ensure_whole(memory, path) > durable


def test_restores(tmp_path: Path) -> None:
    path, memory = tmp_path / "s.bin", MemoryStore()
    with DataStream.create(path) as stream:
        fill(stream, 5.3)
        push(path, memory)
        archive = opened(memory)
        manifest = archive.newest()[0]
        for at in (0, 1, 2, stream.total_entries // 2, stream.total_entries - 1):
            out = tmp_path / f"{at}.bin"
            assert restore(archive, out, manifest, to_entry=at).header.total_entries == at
            with DataStream.open(out, verify="always") as made:
                assert [e.data for e in made.entries()] == [e.data for e in stream.entries(0, at)]
                assert made.epoch == stream.epoch + RESTORED_EPOCHS
                made.append(2, b"goes on")
                assert made.entry(at).data == b"goes on"


def test_the_index_of_a_restored_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has all bookmarks of the pages that were restored, also those of one key, and the file is
    not read for it once more."""
    path, out, memory = tmp_path / "s.bin", tmp_path / "r.bin", MemoryStore()
    with DataStream.create(path) as stream:
        for seed in range(6):
            with stream.atomic_op() as op:
                op.add_bookmark(b"again")
            fill(stream, 0.9, seed)
        wanted = [pair for batch in stream.batches() for pair in batch.bookmarks()]
    push(path, memory)
    with monkeypatch.context() as patched:
        patched.setattr(IndexBuilder, "read", None)
        restore(opened(memory), out, newest(memory))
        with DataStream.open(out) as made:
            index = made.bookmarks.trusted.index
            assert isinstance(index, LmdbIndex)
            assert sorted(index.everything()) == sorted(wanted)
            assert made.bookmarks.lag() == 0
    with DataStream.open(out) as made:
        first, second, *_ = (number for key, number in wanted if key == b"again")
        made.truncate(second)
        assert made.bookmark(b"again") == first


def test_a_restore_without_a_place_for_the_index(tmp_path: Path) -> None:
    path, out, memory = tmp_path / "s.bin", tmp_path / "r.bin", MemoryStore()
    with DataStream.create(path) as stream:
        fill(stream, 5.3)
        push(path, memory)
        out.with_name("r.bin.index").write_bytes(b"something else")
        with pytest.raises(IndexFailed, match="in the place of the bookmark index"):
            restore(opened(memory), out, newest(memory))
        with DataStream.open(out, read_only=True, verify="always") as made:
            assert [e.data for e in made.entries()] == [e.data for e in stream.entries()]


def test_a_restore_that_was_killed_goes_on(tmp_path: Path) -> None:
    path, out, memory = tmp_path / "s.bin", tmp_path / "r.bin", MemoryStore()
    with DataStream.create(path) as stream:
        fill(stream, 30)
    push(path, memory, pages=8)
    seen = 0

    def fail(operation: str, name: str) -> str:
        nonlocal seen
        seen += operation == "get_range"
        return "403" if seen > 6 else ""

    memory.fault = fail
    with pytest.raises(PermissionError):
        restore(opened(memory), out, opened(memory).newest()[0])
    assert not out.exists()
    memory.fault = lambda operation, name: ""
    manifest = opened(memory).newest()[0]
    # A page that was half written is fetched again.
    staged = tmp_path / "r.bin.restoring"
    with staged.open("r+b") as file:
        file.seek(page_start(2) + 100)
        file.write(b"torn")
    made = restore(opened(memory), out, manifest)
    assert made.header.total_entries == manifest.head.entries
    assert (
        path.read_bytes()[HEADER_PAGE_SIZE : made.header.total_length]
        == (out.read_bytes()[HEADER_PAGE_SIZE : made.header.total_length])
    )
    assert not staged.exists()


def test_a_restored_file_continues_its_archive(tmp_path: Path) -> None:
    path, out, memory = tmp_path / "s.bin", tmp_path / "r.bin", MemoryStore()
    with DataStream.create(path) as stream:
        fill(stream, 3)
        push(path, memory)
        fill(stream, 1)  # lost with its disk
    restore(opened(memory), out, opened(memory).newest()[0])
    with DataStream.open(out) as stream:
        fill(stream, 2, seed=9)
        push(out, memory)
        assert newest(memory).generation == 1
        assert ensure_whole(memory, out) == stream.total_entries
    with pytest.raises(ArchiveDiverged):
        push(path, memory)
    restore(opened(memory), tmp_path / "cut.bin", newest(memory), to_entry=5)
    push(tmp_path / "cut.bin", memory)
    assert (newest(memory).generation, newest(memory).reason) == (2, "restore")


def test_what_is_no_archive(tmp_path: Path) -> None:
    memory = MemoryStore()
    with pytest.raises(ArchiveMissing, match="no archive there"):
        opened(memory)
    path = tmp_path / "s.bin"
    DataStream.create(path).close()
    push(path, memory)
    with pytest.raises(ArchiveMissing, match="no manifest of generation 7"):
        opened(memory).chosen(generation=7)
    with pytest.raises(DamagedArchive, match=r"m/0000000000000009.json.zst is missing"):
        opened(memory).chosen(number=9)
    when = memory.objects["stream.json"][1]
    for content in (b"", b"[]", b"{}", b'{"format": 2, "archive_id": "00"}', b"\xff"):
        memory.objects["stream.json"] = content, when
        with pytest.raises(NotAnArchive):
            opened(memory)


def test_a_store_that_replaces_objects_is_refused(tmp_path: Path) -> None:
    class Replacing(MemoryStore):
        def put(self, name: str, data: bytes) -> None:
            self.objects.pop(name, None)
            super().put(name, data)

    path = tmp_path / "s.bin"
    DataStream.create(path).close()
    memory = Replacing()
    with pytest.raises(ArchiveUnsafe, match="store replaced an object"):
        push(path, memory)
    assert memory.objects == {}


def test_folders(tmp_path: Path) -> None:
    """A folder is a store, too; what only reads makes none."""
    path, url = tmp_path / "s.bin", f"{(tmp_path / 'archive').as_uri()}/a b"
    with pytest.raises(ArchiveMissing):
        OpenArchive.open(url)
    assert not (tmp_path / "archive").exists()
    with DataStream.create(path) as stream:
        fill(stream, 1.2)
    source = ArchivedFile(path)
    writer = ArchiveWriter(source, Store(url))
    assert writer.publish()
    source.close()
    assert OpenArchive.open(url).newest()[0].head.entries == stream.total_entries
    assert (tmp_path / "archive" / "a b").exists()


def test_prunes(tmp_path: Path) -> None:
    """What each kept manifest names stays, and so does what is young."""
    path, memory = tmp_path / "s.bin", MemoryStore()
    now = datetime.now(UTC)
    with DataStream.create(path) as stream:
        for hour in range(300):
            fill(stream, 0.05, seed=hour)
            if hour == 150:
                stream.truncate(stream.total_entries // 2)
            push(path, memory)
            for name, (data, when) in memory.objects.items():
                if now - when < timedelta(hours=1):
                    memory.objects[name] = data, now - timedelta(hours=1.51 * (300 - hour))
        memory.objects["s/000000000000-0001-0000000000000000.zst"] = b"", now - timedelta(days=30)
        memory.objects["s/000000000000-0001-0000000000000001.zst"] = b"", now
        archive = opened(memory)
        found = prunable(archive)
        assert len(found.manifests) == 189
        assert "s/000000000000-0001-0000000000000000.zst" in found.objects
        assert "s/000000000000-0001-0000000000000001.zst" not in found.objects
        kept = archive.numbers()[len(found.manifests) :]
        named = {row.object for each in kept for row in archive.manifest(each)[0].rows}
        assert not named & set(found.objects)
        assert len(found.objects) > 100
        prune(archive, found)
        assert ensure_whole(memory, path) == stream.total_entries
        assert prunable(archive, 0.0).manifests == [
            f"m/{number:016d}.json.zst" for number in range(kept[0], 237)
        ]
        assert push(path, memory) is False


def test_a_prune_whose_bucket_is_missing_for_a_moment(tmp_path: Path) -> None:
    """It lists no manifest, so nothing would be named by one."""
    path, memory = tmp_path / "s.bin", MemoryStore()
    with DataStream.create(path) as stream:
        fill(stream, 1.5)
    push(path, memory)
    month_ago = datetime.now(UTC) - timedelta(days=30)
    memory.objects = {name: (data, month_ago) for name, (data, _) in memory.objects.items()}
    archive = opened(memory)
    memory.fault = lambda operation, name: "404" if (operation, name) == ("list", "m/") else ""
    with pytest.raises(ArchiveMissing):
        prunable(archive)


def test_a_writer_whose_bucket_is_missing_for_a_moment(tmp_path: Path) -> None:
    """It does not begin the archive again, although the first manifest was pruned."""
    path, memory = tmp_path / "s.bin", MemoryStore()
    with DataStream.create(path) as stream:
        for _ in range(3):
            fill(stream, 0.1)
            push(path, memory)
    del memory.objects["m/0000000000000001.json.zst"]
    memory.fault = lambda operation, name: "404" if (operation, name) == ("list", "m/") else ""
    with pytest.raises(ArchiveMissing):
        push(path, memory)
    memory.fault = lambda operation, name: ""
    assert push(path, memory) is False
    ensure_whole(memory, path)


def test_a_lost_answer_to_a_manifest_is_no_fence(tmp_path: Path) -> None:
    """The manifest is there, its answer is lost, and the store fails on."""
    path, memory = tmp_path / "s.bin", MemoryStore()
    with DataStream.create(path) as stream:
        fill(stream, 1)
        writer = writer_of(path, memory)
        assert writer.publish()
        fill(stream, 1)
        lost = False

        def fault(operation: str, name: str) -> str:
            nonlocal lost
            lost = lost or name == "m/0000000000000002.json.zst"
            return ("lost" if operation == "put" else "500") * lost

        memory.fault = fault
        with pytest.raises(ArchiveUnreachable):
            writer.publish()
        memory.fault = lambda operation, name: ""
        with pytest.raises(StreamBusy):
            writer.publish()
        fill(stream, 1)
        assert writer.publish()
        writer.source.close()
        assert newest(memory).number == 3
        assert ensure_whole(memory, path) == stream.total_entries


def test_what_was_put_is_not_put_again(tmp_path: Path) -> None:
    path, memory = tmp_path / "s.bin", MemoryStore()
    with DataStream.create(path) as stream:
        fill(stream, 9)
    writer = writer_of(path, memory)
    memory.fault = lambda operation, name: "403" * name.startswith("m/00")
    for _ in range(3):
        with pytest.raises(PermissionError):
            writer.publish()
    segments = [name for name in memory.objects if "-0004-" in name]
    assert len(segments) == 2
    memory.fault = lambda operation, name: ""
    assert writer.publish()
    assert segments == [name for name in memory.objects if "-0004-" in name]
    writer.source.close()
    ensure_whole(memory, path)


def test_a_change_excuses_no_other_difference(tmp_path: Path) -> None:
    """A copy with other entries truncates one: the archive's are not replaced by the rest."""
    path, copy, memory = tmp_path / "s.bin", tmp_path / "c.bin", MemoryStore()
    with DataStream.create(path) as stream:
        fill(stream, 1)
    shutil.copy(path, copy)
    for each, seed in ((path, 1), (copy, 2)):
        with DataStream.open(each) as stream:
            fill(stream, 6, seed=seed)
    push(path, memory)
    with DataStream.open(copy) as stream:
        stream.truncate(stream.total_entries - 1)
    with pytest.raises(ArchiveDiverged):
        push(copy, memory)


def test_another_machine_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy of the file there may be a test; the first writer must not be fenced by it."""
    path, memory = tmp_path / "s.bin", MemoryStore()
    with DataStream.create(path) as stream:
        fill(stream, 0.1)
        push(path, memory)
        fill(stream, 0.1)
    monkeypatch.setattr("socket.gethostname", lambda: "elsewhere")
    with pytest.raises(ArchiveBusy, match="wait for 600 s"):
        push(path, memory)
    assert push(path, memory, takeover=True)


def test_a_writer_that_waited_looks_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, memory = tmp_path / "s.bin", MemoryStore()
    now, host = [0], ["first"]
    monkeypatch.setattr("socket.gethostname", lambda: host[0])
    monkeypatch.setattr("datastreamer.archive.writer.now_ms", lambda: now[0])
    with DataStream.create(path) as stream:
        first, second = writer_of(path, memory), writer_of(path, memory)
        fill(stream, 0.1)
        assert first.publish()
        for at in (1, 599_000, 700_000):
            now[0], host[0] = at, "elsewhere"
            with pytest.raises(ArchiveBusy):
                second.publish()
            fill(stream, 0.1)
            host[0] = "first"
            assert first.publish()
        now[0], host[0] = now[0] + 600_000, "elsewhere"
        fill(stream, 0.1)
        assert second.publish()
        for each in (first, second):
            each.source.close()
        assert newest(memory).writer.term == 2


def test_a_fence_outlives_its_manifest(tmp_path: Path) -> None:
    path, memory = tmp_path / "s.bin", MemoryStore()
    with DataStream.create(path) as stream:
        old, new = writer_of(path, memory), writer_of(path, memory)
        for writer in (old, new, new):
            fill(stream, 0.1)
            assert writer.publish()
        for number in (1, 2):
            del memory.objects[f"m/{number:016d}.json.zst"]
        fill(stream, 0.1)
        with pytest.raises(ArchiveFenced):
            old.publish()
        # It has put no manifest before the others.
        assert opened(memory).numbers() == [3]
        for each in (old, new):
            each.source.close()


def test_a_relay_is_a_stream_of_its_own(tmp_path: Path) -> None:
    path, memory = tmp_path / "s.bin", MemoryStore()
    with DataStream.create(path) as stream:
        fill(stream, 1.5)
        push(path, memory)
        restore(opened(memory), tmp_path / "r.bin", newest(memory), relay=True)
        with DataStream.open(tmp_path / "r.bin") as relay:
            assert relay.stream_id != stream.stream_id
            assert relay.epoch == 0
            assert relay.parts.relay.agreement == (stream.stream_id, stream.epoch, 0, 0, 0, 0)
            assert relay.total_entries == stream.total_entries
    push_again = writer_of(tmp_path / "r.bin", memory)
    with pytest.raises(ArchiveBusy):
        push_again.publish()
    push_again.source.close()


@pytest.mark.parametrize(
    "url", ["s3://[bad", "file:folder", "file://", "s3:bucket", "FILE:///x", "", "https://x/y"]
)
def test_urls_that_are_none(url: str) -> None:
    with pytest.raises(BadArgument):
        Store(url, backend=MemoryStore())


def test_errors_have_no_secrets_and_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "a-key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "a-secret")
    for endpoint in ("http://user:SECRET@127.0.0.1:1", "http://127.0.0.1:99999"):
        monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
        with pytest.raises(ArchiveUnreachable) as caught:
            OpenArchive(Store("s3://bucket/x", timeout=0.1))
        assert "SECRET" not in str(caught.value)
        assert "secret" not in str(caught.value)


@pytest.mark.parametrize("url", ["file:///proc/archive", "s3://bucket/x"])
def test_a_bucket_that_does_not_exist(tmp_path: Path, url: str) -> None:
    memory = MemoryStore()
    memory.fault = lambda operation, name: "404"
    path = tmp_path / "s.bin"
    DataStream.create(path).close()
    source = ArchivedFile(path)
    store = Store(url, backend=memory if url.startswith("s3") else None)
    with pytest.raises(ArchiveMissing, match="the bucket does not exist, or the folder"):
        ArchiveWriter(source, store).publish()
    source.close()
