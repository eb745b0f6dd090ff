"""Archives as sources of commands: what they print is what the file's commands print."""

from __future__ import annotations

import logging
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from datastreamer import Archive
from datastreamer.selection.times import moment_text
from datastreamer.storage.maintain.check import verify
from datastreamer.storage.stream import DataStream
from tests.archive.stores import fill
from tests.cli.conftest import ENTRIES, Invoke, archived
from tests.cli.process import running
from tests.cli.verbs.test_reassemble import line_of, messages_of, write
from tests.network.damage import A_PAGE, PAGES, flip, written
from tests.network.timed import TOTAL, ms, timed


def objects(source: str, prefix: str = "s/") -> list[Path]:
    """The files of an archive's objects, the oldest page first."""
    return sorted(Path(source.removeprefix("archive:file://")).glob(f"{prefix}*"))


READS = [
    "cat X --format raw",
    "cat X --format hex --from 1000 --to 1100",
    "cat X --last 30 --json",
    "cat X --type 2 --prefix 0x07 --format raw",
    "cat X --from-bookmark KEY --to-bookmark KEY --format raw",
    "entry X 777 --format raw",
    "bookmark X KEY --format raw",
    "bookmark X KEY --entry-number",
    "export X OUT.jsonl --from 100 --to 1500",
    "zkevm check X --json",
]


@pytest.mark.parametrize("pages", [0.0, 0.4, 40.7])
def test_the_same_bytes(invoke: Invoke, tmp_path: Path, pages: float) -> None:
    path = tmp_path / "s.bin"
    with DataStream.create(path, sync="os") as stream:
        fill(stream, pages)
        entries = stream.entries()
        key = next((f"0x{each.data.hex()}" for each in entries if each.type == 0xB0), "x")
    # Times of entries are not in an archive.
    path.with_name("s.bin.pages").unlink(missing_ok=True)
    compare(invoke, path, tmp_path, key)


def test_the_real_stream(invoke: Invoke, real_stream: Path, tmp_path: Path) -> None:
    path = Path(shutil.copyfile(real_stream, tmp_path / "real.bin"))
    source = compare(invoke, path, tmp_path, "block:100")
    for words in (["zkevm", "block", "100"], ["cat", "--decode", "zkevm", "--to", "2000"]):
        at = 2 if words[0] == "zkevm" else 1
        found = [invoke(*words[:at], each, *words[at:], "--json") for each in (path, source)]
        assert found[0].code == 0
        assert found[0].out == found[1].out
    diff = invoke("zkevm", "diff", path, source, "--json")
    assert (diff.code, diff.objects[0]["equal"]) == (0, True)


def compare(invoke: Invoke, path: Path, folder: Path, key: str) -> str:
    source = archived(path, folder / "archive")
    for read in READS:
        found = []
        for name in (str(path), source):
            out = folder / "out.jsonl"
            words = read.replace("OUT.jsonl", str(out)).replace("KEY", key).split()
            done = invoke(*(name if word == "X" else word for word in words))
            exported = out.read_bytes() if out.exists() else b""
            out.unlink(missing_ok=True)
            said = done.err.replace(name, "X")
            found.append((done.code, done.out, said if done.code else "", exported))
        assert found[0] == found[1], read
    facts = [invoke("info", name, "--json").objects[0] for name in (path, source)]
    for each in facts:
        del each["file_size"]  # of a file also the pages that are allocated
    assert facts[0] == facts[1]
    return source


def test_follows_a_push_and_ends_at_a_generation(invoke: Invoke, tmp_path: Path) -> None:
    path = tmp_path / "s.bin"
    with DataStream.create(path, index="memory") as stream:
        for number in range(15):
            stream.append(2, b"%d" % number)
        source = archived(path, tmp_path / "archive")
        with running("tail", source, "--format", "hex", cwd=tmp_path) as tail:
            for number in range(5, 15):
                assert (tail.out.next() or "").endswith((b"%d" % number).hex())
            stream.append(2, b"later")
            archived(path, tmp_path / "archive")
            assert (tail.out.next() or "").endswith(b"later".hex())
            stream.truncate(3)
            archived(path, tmp_path / "archive")
            assert tail.wait() == 1
            url = source.removeprefix("archive:")
            (line,) = tail.err.rest()
            assert line == (
                f"error: {url}: entries were truncated or updated (truncation at entry 3): "
                "generation 2 follows generation 1, which was read up to entry 16; begin again"
            )
        with running("cat", source, "--follow", "--json", cwd=tmp_path) as follower:
            follower.out.next()
            follower.signal(signal.SIGINT)
            assert follower.wait() == 0
            assert follower.err.rest() == []


def test_from_a_time_on(invoke: Invoke, tmp_path: Path) -> None:
    """All are in one page."""
    path = tmp_path / "s.bin"
    with DataStream.create(path, version=2, sync="os", index="memory") as stream:
        timed(stream)
    source = archived(path, tmp_path / "archive")
    for seconds, first in ((0.0, 0), (3600.0, 0), (3601.0, TOTAL)):
        cat = invoke("cat", source, "--from-time", moment_text(ms(seconds)), "--json")
        assert cat.code == 0
        assert [each["number"] for each in cat.objects] == list(range(first, TOTAL))


def test_reassembles(invoke: Invoke, tmp_path: Path) -> None:
    first = write(tmp_path / "a.bin", *messages_of(1), *messages_of(2)[:2])
    second = write(tmp_path / "b.bin", *messages_of(2))
    sources = [archived(path, tmp_path / path.stem) for path in (first, second)]
    done = invoke("reassemble", *sources, "--json")
    assert done.code == 0, done
    assert sorted(done.objects, key=str) == [line_of(1), line_of(2)]
    with running("reassemble", *sources, "--follow", "--json", cwd=tmp_path) as following:
        for _ in range(2):
            following.out.next()
        write(second, *messages_of(3))
        archived(second, tmp_path / "b")
        assert following.out.until(str(line_of(3)["id"]))
        following.signal(signal.SIGINT)
        assert following.wait() == 0
    bad = invoke("reassemble", "archive:file:///no/such/folder")
    assert bad.code == 1
    assert bad.err.splitlines()[-1].startswith("error: file:///no/such/folder: no archive there")


def test_verifies(invoke: Invoke, archive: str) -> None:
    done = invoke("verify", archive, "--json")
    assert done == invoke("archive", "verify", archive.removeprefix("archive:"), "--json")
    assert (done.code, done.objects[0]["entries"]) == (0, ENTRIES)


def test_damage(invoke: Invoke, tmp_path: Path) -> None:
    path = tmp_path / "s.bin"
    with DataStream.create(path, sync="os") as stream:
        fill(stream, 3)
        last = stream.reader.first_number(2) - 1
    source = archived(path, tmp_path / "archive")
    bad = objects(source)[0]
    content = bytearray(bad.read_bytes())
    content[400] ^= 1
    bad.write_bytes(content)
    for words in (("cat", source), ("entry", source, 0), ("verify", source)):
        assert bad.name in str(invoke(*words)[1:])
        assert invoke(*words).code == 3
    assert invoke("entry", source, last + 1).code == 0
    bad.unlink()
    line = invoke("cat", source).failed(3)
    assert line.endswith("is missing, or shorter than it was")
    shutil.rmtree(tmp_path / "archive")
    url = source.removeprefix("archive:")
    missing = f"{url}: no archive there: the bucket or folder is missing, or has no stream.json"
    for words in (("cat", source), ("verify", source), ("tail", source), ("info", source)):
        assert invoke(*words).failed() == missing
    assert "is not the URL of an archive" in invoke("cat", "archive:stream.bin").failed(1)


# Healing.


@pytest.fixture
def damaged(tmp_path: Path) -> Path:
    path = tmp_path / "stream.bin"
    written(path)
    return path


def test_repairs_by_proven_checksums(invoke: Invoke, damaged: Path) -> None:
    source = archived(damaged, damaged.parent / "archive")
    for page in (0, 3, 4, PAGES):
        flip(damaged, page)
    dry = invoke("repair", damaged, "--from", source, "--dry-run")
    assert (dry.code, invoke("verify", damaged).code) == (0, 3)
    done = invoke("repair", damaged, "--from", source, "--json")
    assert done.code == 0, done
    restored = [(each["page"], each["restored_from"]) for each in done.objects[0]["pages"]]
    assert restored == [(page, source) for page in (0, 3, 4, PAGES)]
    assert verify(damaged).ok


def test_repairs_by_the_chain_alone(invoke: Invoke, damaged: Path) -> None:
    """Without the file of the checksums, those of the archive lead to the commit record's chain."""
    source = archived(damaged, damaged.parent / "archive")
    damaged.with_name("stream.bin.sums").unlink()
    flip(damaged, 3)
    assert invoke("repair", damaged, "--from", source).code == 0
    assert verify(damaged).ok


def test_is_no_witness_of_pages_without_a_checksum(invoke: Invoke, damaged: Path) -> None:
    """Not with a server either, which might be where the archive's entries come from."""
    folder = damaged.parent / "other"
    folder.mkdir()
    copy = shutil.copyfile(damaged, folder / "copy.bin")
    source = archived(damaged, damaged.parent / "archive")
    damaged.with_name("stream.bin.sums").unlink()
    with damaged.open("r+b") as file:
        file.seek(64)
        file.write(bytes(2048))  # the records of the header page
    flip(damaged, 3, at=0)
    before = damaged.read_bytes()
    only = f"{source} is an archive, and these pages have no checksum"
    for more in ((), ("--trust-peer",)):
        refused = invoke("repair", damaged, "--from", source, *more, "--dry-run", "--json")
        assert refused.code == 3
        (page,) = refused.objects[0]["pages"]
        assert (page["restored_from"], page["refused"]) == (None, only)
    with running("serve", copy, "--host", "127.0.0.1", "--port", "0", cwd=folder) as other:
        server = f"127.0.0.1:{other.port()}"
        words = ("repair", damaged, "--from", source, "--from", server, "--json")
        (page,) = invoke(*words, "--dry-run").objects[0]["pages"]
        assert page["restored_from"] is None
        assert only in page["refused"]
        assert f"only {server} sends these entries" in page["refused"]
    assert damaged.read_bytes() == before


def test_another_stream_s_archive(invoke: Invoke, damaged: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.bin"
    with DataStream.create(other, sync="os") as stream:
        fill(stream, PAGES + 2)
    source = archived(other, tmp_path / "archive")
    flip(damaged, 3)
    done = invoke("repair", damaged, "--from", source, "--json")
    assert done.code == 3
    assert done.objects[0]["pages"][0]["restored_from"] is None
    missing = invoke("repair", damaged, "--from", "archive:file:///no/where", "--json")
    assert missing.code == 3
    assert "no archive there" in missing.objects[0]["pages"][0]["refused"]


def test_a_server_heals_from_an_archive(invoke: Invoke, damaged: Path) -> None:
    source = archived(damaged, damaged.parent / "archive")
    flip(damaged, 3)
    words = ("--host", "127.0.0.1", "--port", "0", "--scrub", "1GB/s", "--heal", source)
    with running("serve", damaged, *words, cwd=damaged.parent) as serving:
        serving.err.until(f"page 3 .entries {3 * A_PAGE} to .*restored from {source}; the damaged")
        serving.signal(signal.SIGTERM)
        assert serving.wait() == 0
    assert verify(damaged).ok
    refused = invoke("serve", damaged, "--heal", "archive:stream")
    assert "is not the URL of an archive" in refused.err
    assert refused.code


# A bucket.


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    pytest.importorskip("moto", reason="moto is not installed: pip install '.[dev]'")
    pytest.importorskip("flask_cors", reason="flask-cors is not installed: pip install '.[dev]'")
    import boto3
    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    settings = {
        "AWS_ENDPOINT_URL": f"http://{host}:{port}",
        "AWS_REGION": "us-east-1",
        "AWS_ACCESS_KEY_ID": "key",
        "AWS_SECRET_ACCESS_KEY": "secret",
    }
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    client = boto3.client("s3", endpoint_url=f"http://{host}:{port}", region_name="us-east-1")
    client.create_bucket(Bucket="bucket")
    yield "s3://bucket/some/stream"
    server.stop()


def test_a_bucket(invoke: Invoke, tmp_path: Path, bucket: str) -> None:
    path, source = tmp_path / "s.bin", f"archive:{bucket}"
    assert "no archive there" in invoke("cat", source).failed()
    with DataStream.create(path, sync="os") as stream:
        fill(stream, 9)
        path.with_name("s.bin.pages").unlink(missing_ok=True)
        assert invoke("archive", "push", path, bucket).code == 0
        fill(stream, 0.5)
        stream.sync()
        assert invoke("archive", "push", path, bucket, "--json").objects[0]["manifest"] == 2
        (listed,) = invoke("archive", "list", bucket, "--json").objects
        assert listed["total_entries"] == stream.total_entries
        assert invoke("verify", source, "--json").objects[0]["ok"]
        raw = invoke("cat", path, "--format", "raw")
        assert invoke("cat", source, "--format", "raw") == raw
        key = next(each.data for each in stream.entries() if each.type == 0xB0)
        with Archive.open(bucket) as archive:
            assert archive.bookmark(key) == stream.bookmark(key)
    assert invoke("archive", "restore", bucket, tmp_path / "r.bin").code == 0
    assert (tmp_path / "r.bin").read_bytes()[4096:] == path.read_bytes()[4096:][: 10 << 20]
    assert verify(tmp_path / "r.bin").ok
