"""The archiver beside a writer: what it publishes, when, and that no error reaches the stream."""

from __future__ import annotations

import shutil
import threading
import time
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from datastreamer.archive import archiver
from datastreamer.archive.archived_file import ArchivedFile
from datastreamer.archive.beside import archiving, restored
from datastreamer.archive.check import check
from datastreamer.archive.follower import in_common
from datastreamer.archive.options import ArchiveOptions
from datastreamer.archive.writer import ArchiveWriter
from datastreamer.errors import BadArgument, DatastreamerError, StreamReadOnly
from datastreamer.format import PAGE_SIZE
from datastreamer.http.serving import source_of
from datastreamer.metrics.writer_numbers import unready_archive
from datastreamer.relay.relay import Relay
from datastreamer.service.embedded import StreamServer
from datastreamer.storage.objects.opened import OpenArchive
from datastreamer.storage.stream import DataStream
from tests.archive.stores import MemoryStore, fill, opened, push, until


def entries_in(url: str) -> int:
    try:
        return OpenArchive.open(url).newest()[0].head.entries
    except DatastreamerError:
        return -1


def sample(stream: DataStream, name: str) -> float:
    numbers = stream.parts.counters.share()
    assert numbers is not None
    found = numbers.samples().get(f"datastreamer_archive_{name}", [([], -1)])
    value = found[0][1]
    assert isinstance(value, int | float)
    return value


def test_a_served_stream_is_archived(tmp_path: Path) -> None:
    url = (tmp_path / "archive").as_uri()
    options = ArchiveOptions(url, interval=0.2, segment=16 * PAGE_SIZE)
    with StreamServer(
        tmp_path / "s.bin", host="127.0.0.1", port=0, in_process=True, archive=options
    ) as server:
        stream = server.stream
        fill(stream, 2)
        until(lambda: entries_in(url) == stream.total_entries)
        fill(stream, 1)
        until(lambda: sample(stream, "entries") == stream.total_entries)
        assert sample(stream, "publications_total") > 1
        samples = stream.parts.counters.share().samples()  # type: ignore[union-attr]
        requests = {(*labels,): n for labels, n in samples["datastreamer_archive_requests_total"]}
        # The first stream.json is not there.
        assert requests["get", "missing"] == 1
        assert requests["create", "ok"] >= 4
        assert requests["create", "failed"] == 0
        assert sample(stream, "lag_bytes") == sample(stream, "lag_seconds") == 0
        fill(stream, 0.3)
        total = stream.total_entries
    # The end publishes a last time.
    assert entries_in(url) == total
    assert check(OpenArchive.open(url)).problems == []


def test_the_lag_of_a_stream_that_always_grows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It counts from the last publication, although no look finds everything archived."""
    publish = ArchiveWriter.publish

    def publish_meanwhile(self: ArchiveWriter) -> bool:
        news = publish(self)
        stream.append(2, b"meanwhile")
        return news

    monkeypatch.setattr(archiver, "_LOOK_SECONDS", 0.02)
    monkeypatch.setattr(ArchiveWriter, "publish", publish_meanwhile)
    options = ArchiveOptions((tmp_path / "archive").as_uri(), interval=0.05)
    with DataStream.create(tmp_path / "s.bin") as stream, archiving(stream, options):
        until(lambda: sample(stream, "publications_total") >= 1)
        first = time.time()
        until(lambda: sample(stream, "publications_total") >= 3)
        assert sample(stream, "lag_seconds") <= time.time() - first


def test_a_full_segment_is_not_waited_for(tmp_path: Path) -> None:
    url = (tmp_path / "archive").as_uri()
    options = ArchiveOptions(url, interval=10_000, segment=16 * PAGE_SIZE)
    with DataStream.create(tmp_path / "s.bin") as stream, archiving(stream, options):
        until(lambda: entries_in(url) == 0)
        fill(stream, 17)
        until(lambda: entries_in(url) > 0)


def test_a_store_that_fails(tmp_path: Path) -> None:
    """A file is in the folder's place: commits go on, and later the archive does."""
    folder = tmp_path / "archive"
    folder.write_text("")
    options = ArchiveOptions(folder.as_uri(), interval=0.1, timeout=0.1)
    with DataStream.create(tmp_path / "s.bin") as stream, archiving(stream, options):
        fill(stream, 0.5)
        until(lambda: sample(stream, "failures_in_a_row") > 2)
        assert sample(stream, "lag_bytes") > 0
        assert sample(stream, "entries") == 0
        fill(stream, 0.5)
        folder.unlink()
        until(lambda: entries_in(folder.as_uri()) == stream.total_entries)
        until(lambda: sample(stream, "failures_in_a_row") == 0)


def test_an_archive_that_lags_makes_a_server_unready(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(archiver, "_LOOK_SECONDS", 0.02)
    folder = tmp_path / "archive"
    options = ArchiveOptions(folder.as_uri(), interval=0.05, timeout=0.05)
    with DataStream.create(tmp_path / "s.bin") as stream:
        server, numbers = SimpleNamespace(unready="", stream=stream), stream.parts.counters.share()
        unready = source_of(server, numbers).unready  # type: ignore[arg-type]
        folder.write_text("")
        with archiving(stream, replace(options, ready_lag=0.01)):
            fill(stream, 0.1)
            until(lambda: "the archive lags by" in unready())
            folder.unlink()
            until(lambda: unready() == "")
        folder.rename(tmp_path / "elsewhere")
        folder.write_text("")
        with archiving(stream, options):
            fill(stream, 0.1)
            until(lambda: sample(stream, "failures_in_a_row") > 1)
            assert unready() == ""


def test_a_follower_that_does_not_reach_its_archive(tmp_path: Path) -> None:
    folder = tmp_path / "archive"
    options = ArchiveOptions(folder.as_uri(), interval=0.05, timeout=0.05, ready_lag=0.01)
    with DataStream.create(tmp_path / "s.bin") as stream, archiving(stream, options):
        fill(stream, 0.1)
    with (
        DataStream.create(tmp_path / "f.bin") as made,
        archiving(made, replace(options, mode="follow")),
    ):
        until(lambda: sample(made, "entries") == made.total_entries > 0)
        assert unready_archive(made.parts.counters.share()) == ""
        folder.rename(tmp_path / "elsewhere")
        until(lambda: unready_archive(made.parts.counters.share()) != "")
        assert sample(made, "failures_in_a_row") > 0
        (tmp_path / "elsewhere").rename(folder)
        until(lambda: unready_archive(made.parts.counters.share()) == "")


def test_the_second_writer_of_an_archive_ends_the_first(tmp_path: Path) -> None:
    url = (tmp_path / "archive").as_uri()
    options = ArchiveOptions(url, interval=0.1)
    path = tmp_path / "s.bin"
    with DataStream.create(path) as stream, archiving(stream, options):
        fill(stream, 0.5)
        until(lambda: entries_in(url) == stream.total_entries)
        stream.snapshot(tmp_path / "copy.bin")
        with (
            DataStream.open(tmp_path / "copy.bin") as other,
            archiving(other, options),
        ):
            fill(other, 0.1, seed=1)
            until(lambda: entries_in(url) == other.total_entries)
            taken = other.total_entries
        fill(stream, 0.1, seed=2)
        until(lambda: sample(stream, "fenced") == 1)
        assert stream.append(2, b"goes on") == stream.total_entries - 1
    assert entries_in(url) == taken
    assert "archiver" not in {thread.name for thread in threading.enumerate()}


def test_a_relay_without_a_file_begins_with_the_archive(tmp_path: Path) -> None:
    url = (tmp_path / "archive").as_uri()
    options = ArchiveOptions(url, mode="read")
    path = tmp_path / "r.bin"
    assert not restored(options, str(path))
    assert "made from file://" in Relay([("127.0.0.1", 9)], path, archive=options)._unready()
    with (
        DataStream.create(tmp_path / "s.bin") as stream,
        archiving(stream, ArchiveOptions(url)),
    ):
        fill(stream, 1.5)
    assert restored(options, str(path))
    assert not restored(options, str(path))
    with (
        DataStream.open(path) as made,
        archiving(made, options),
    ):
        assert made.total_entries == stream.total_entries
        fill(made, 0.1)
    assert entries_in(url) == stream.total_entries


@pytest.mark.parametrize(
    "wrong",
    [{"segment": 5}, {"segment": 1 << 40}, {"level": 0}, {"level": 10}, {"interval": 0}],
)
def test_wrong_options(wrong: dict[str, int]) -> None:
    with pytest.raises(BadArgument):
        ArchiveOptions("file:///x", **wrong)  # type: ignore[arg-type]


def test_a_wrong_url_is_an_error_at_the_start(tmp_path: Path) -> None:
    with DataStream.create(tmp_path / "s.bin") as stream:
        for url in ("nothing", "s3:///", "ftp://x/y", "s3://key:secret@bucket/x", "file://host/x"):
            with pytest.raises(BadArgument) as caught:
                archiving(stream, ArchiveOptions(url))
            assert "secret" not in str(caught.value)


def test_a_relay_without_an_upstream_follows_the_archive(tmp_path: Path) -> None:
    url, path = (tmp_path / "archive").as_uri(), tmp_path / "r.bin"
    follow = ArchiveOptions(url, mode="follow", interval=0.05)
    with DataStream.create(tmp_path / "s.bin") as stream:
        fill(stream, 1.5)
        with archiving(stream, ArchiveOptions(url, interval=0.1)):
            until(lambda: entries_in(url) == stream.total_entries)
            assert restored(follow, str(path))
            with DataStream.open(path) as made, archiving(made, follow):
                fill(stream, 2)
                until(lambda: made.total_entries == stream.total_entries)
                fill(stream, 0.5, seed=3)
                until(lambda: made.total_entries == stream.total_entries)
                same = [batch.packed() for batch in made.batches()]
                assert same == [batch.packed() for batch in stream.batches()]
                total = stream.total_entries
                stream.truncate(total // 2)
                fill(stream, 0.2, seed=4)
                until(lambda: entries_in(url) == stream.total_entries)
                until(lambda: "archive follower" not in threads())
                assert made.total_entries == total
            again = replace(follow, takeover=True)
            with DataStream.open(path) as made, archiving(made, again):
                until(lambda: made.total_entries == stream.total_entries)
                same = [batch.packed() for batch in made.batches()]
                assert same == [batch.packed() for batch in stream.batches()]
    assert "archive follower" not in threads()


def threads() -> set[str]:
    return {thread.name for thread in threading.enumerate()}


@pytest.mark.parametrize("at", [0, 1, 7, 40, 10**6])
def test_what_a_file_and_an_archive_have_in_common(tmp_path: Path, at: int) -> None:
    path, copy, memory = tmp_path / "s.bin", tmp_path / "c.bin", MemoryStore()
    with DataStream.create(path) as stream:
        fill(stream, 3.4)
        total = stream.total_entries
    shutil.copy(path, copy)
    push(path, memory, pages=2)
    with DataStream.open(copy) as stream:
        number = min(at, total)
        if number < total:
            stream.truncate(number)
        for _ in range(at % 3):
            stream.append(2, b"other")
    with closing(ArchivedFile(copy)) as file:
        found = in_common(opened(memory), opened(memory).newest()[0], file)
    # Whole pages are compared: no entry of a page that differs counts as in common.
    assert found <= number
    if not at % 3:
        assert found == number


def test_a_last_page_that_ends_sooner_in_the_archive(tmp_path: Path) -> None:
    """The archived stream was truncated within it, and went on in the next page."""
    memory, path = MemoryStore(), tmp_path / "s.bin"
    with DataStream.create(path, sync="os") as stream:
        with stream.atomic_op() as op:
            op.add_entries(2, [bytes(100_000)] * 15)
        stream.snapshot(tmp_path / "behind.bin")
        page = stream.reader.cursor(12).offset // PAGE_SIZE
        stream.truncate(12)
        with stream.atomic_op() as op:
            op.add_entry(2, bytes(900_000))
        assert stream.reader.cursor(12).offset // PAGE_SIZE == page + 1
    push(path, memory)
    file = ArchivedFile(tmp_path / "behind.bin")
    with closing(file):
        assert in_common(opened(memory), opened(memory).newest()[0], file) == 12


def test_only_a_writer_archives(tmp_path: Path) -> None:
    DataStream.create(tmp_path / "s.bin").close()
    with (
        DataStream.open(tmp_path / "s.bin", follow=True) as stream,
        pytest.raises(StreamReadOnly, match="only the process that writes"),
    ):
        archiving(stream, ArchiveOptions((tmp_path / "archive").as_uri()))
