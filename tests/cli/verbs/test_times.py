"""Times on the command line: where reading begins, and in JSON."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from datastreamer.selection.times import moment_text
from datastreamer.service.embedded import StreamServer
from datastreamer.storage.stream import DataStream
from tests.cli.conftest import Invoke
from tests.cli.process import ENVIRONMENT, command, running
from tests.consumer.test_times import PAYLOADS, write
from tests.http.test_times import TIMES
from tests.network.stub import Stub, StubServer, handler, sample
from tests.network.timed import PLACES, TOTAL, Clock, ms, timed

SOURCES = ["file", "server"]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("made") / "made.bin"
    with DataStream.create(path, version=2, sync="os", index="memory") as stream:
        timed(stream)
    return path


@pytest.fixture(scope="module")
def server(made: Path) -> Iterator[str]:
    with StreamServer(made, host="127.0.0.1", port=0, in_process=True) as serving:
        yield f"127.0.0.1:{serving.port}"


@pytest.fixture(params=SOURCES)
def source(request: pytest.FixtureRequest, made: Path) -> str:
    return str(made) if request.param == "file" else str(request.getfixturevalue("server"))


@pytest.mark.parametrize("moment", [str, moment_text])
def test_cat_from_a_time_on(invoke: Invoke, source: str, moment: object) -> None:
    for seconds, number in PLACES:
        at = moment(ms(seconds))  # type: ignore[operator]
        cat = invoke("cat", source, "--from-time", at, "--json")
        assert (cat.code, cat.err) == (0, "")
        assert [each["number"] for each in cat.objects] == list(range(number, TOTAL))
    cat = invoke("cat", source, "--from-time", "2026-11-29T07:01:00Z", "--to", "6", "--type", "1")
    assert [each["number"] for each in cat.objects] == [6]
    assert invoke("cat", source, "--from-time", "2026-11-29T07:01:00Z", "--to", "2").out == b""
    cat = invoke("cat", source, "--from-time", "2026-11-29", "--count", "1", "--format", "hex")
    assert len(cat.lines) == 1


def test_json_has_times(invoke: Invoke, source: str) -> None:
    cat = invoke("cat", source, "--json")
    assert [each["time"] for each in cat.objects] == TIMES
    assert list(cat.objects[0]) == ["number", "type", "length", "data", "time"]
    decoded = invoke("cat", source, "--json", "--decode", "zkevm", "--from", "2", "--to", "3")
    assert [(each["number"], each["time"]) for each in decoded.objects] == [
        (2, TIMES[2]),
        (3, TIMES[3]),
    ]
    assert invoke("entry", source, "4", "--json").objects[0]["time"] == TIMES[4]
    for words in (["cat", source, "--to", "4"], ["entry", source, "4"]):
        for form in ("table", "raw", "hex"):
            assert b"time" not in invoke(*words, "--format", form).out


def test_what_is_printed_can_be_appended(invoke: Invoke, made: Path, tmp_path: Path) -> None:
    lines = invoke("cat", made, "--json").out
    copied = subprocess.run(
        command("append", tmp_path / "copy.bin", "--create"),
        input=lines,
        check=True,
        capture_output=True,
        env=ENVIRONMENT,
    )
    assert copied.stderr == b""
    found = invoke("cat", tmp_path / "copy.bin", "--json").objects
    assert [each["data"] for each in found] == [json.loads(it)["data"] for it in lines.splitlines()]


@pytest.mark.parametrize("out", ["out.jsonl", "folder"])
def test_export_from_a_time_on(invoke: Invoke, source: str, tmp_path: Path, out: str) -> None:
    pytest.importorskip("pyarrow")
    done = invoke("export", source, tmp_path / out, "--from-time", "2026-11-29T07:01:00Z")
    assert done.code == 0, done
    assert f"from entries 5 to {TOTAL - 1}" in done.err


@pytest.mark.parametrize(
    "words, message",
    [
        (
            ["cat", "FILE", "--from-time", "yesterday"],
            "'yesterday' is not a time: write 2026-11",
        ),
        (["cat", "FILE", "--from-time", "2026-11-29T07:00:00"], "is not a time: write"),
        (["cat", "FILE", "--from-time", "1795935600"], "or 90s, 10m, 2h or 1d ago"),
        (["cat", "FILE", "--from-time", ""], "'' is not a time"),
        (["cat", "FILE", "--from-time", "1d", "--from", "5"], "exclude each other"),
        (["cat", "FILE", "--from-time", "1d", "--last", "5"], "exclude each other"),
        (["cat", "FILE", "--from-time", "1d", "--from-bookmark", "x"], "exclude each other"),
        (["cat", "localhost:1", "--from-time", "1d", "--no-batch-reads"], "exclude each other"),
        (["tail", "FILE", "--since", "10 m"], "'10 m' is not a time"),
        (["tail", "FILE", "--since", "9999999999d"], "is not a time"),
        (["tail", "FILE", "--since", "1h", "--last", "5"], "exclude each other"),
        (["export", "FILE", "out", "--from-time", "1d", "--from", "5"], "exclude each other"),
        (["export", "FILE", "out", "--from-time", "x"], "'x' is not a time"),
        (["reassemble", "FILE", "--from-time", "1d", "--from", "5"], "exclude each other"),
    ],
)
def test_wrong_usage(invoke: Invoke, words: list[str], message: str) -> None:
    assert message in invoke(*words).failed(2)


def test_times_that_are_not_known(invoke: Invoke, tmp_path: Path) -> None:
    path = tmp_path / "some.bin"
    with DataStream.create(path, sync="os", index="memory") as stream:
        clock = Clock(stream)
        clock.commit(3)
        clock.commit(3, 60.0)
    with StreamServer(path, host="127.0.0.1", port=0, in_process=True) as serving:
        for source in (str(path), f"127.0.0.1:{serving.port}"):
            words = (
                f"{source}: it is not known which entry was committed first at or after "
                "2026-11-29T07:00:00"
            )
            for verb in (["cat", source], ["export", source, tmp_path / "out.jsonl"]):
                failed = invoke(*verb, "--from-time", "2026-11-29T07:00:00Z").failed()
                assert failed.startswith(words)
                assert "entry 3, of 2026-11-29T07:01:00" in failed
            found = invoke("cat", source, "--json").objects
            since = moment_text(ms(60.0))
            assert [each.get("time") for each in found] == [None] * 3 + [since] * 3


def test_a_server_without_times(invoke: Invoke) -> None:
    hundred = sample(100)
    stubs = [handler(Stub(hundred, extensions=kind)) for kind in ("known", "refused")]
    for stub in stubs:
        with StubServer(stub, handler(Stub(hundred)), handler(Stub(hundred))) as server:
            name = f"127.0.0.1:{server.port}"
            failed = invoke("cat", name, "--from-time", "2026-11-29").failed()
            assert failed.startswith(f"{name} does not report when entries were committed")
    with StubServer(*[handler(Stub(hundred)) for _ in range(3)]) as server:
        cat = invoke("cat", f"127.0.0.1:{server.port}", "--json")
        assert [each.get("time") for each in cat.objects] == [None] * 100


@pytest.mark.parametrize("kind", SOURCES)
def test_tail_since(kind: str, tmp_path: Path) -> None:
    """Entries of the last ten minutes, and later ones, with their times."""
    path, now = tmp_path / "now.bin", time.time() - ms(0) / 1000
    with ExitStack() as stack:
        stream = stack.enter_context(DataStream.create(path, sync="os", index="memory"))
        clock = Clock(stream)
        for age in (7200.0, 661.0, 540.0, 30.0):
            clock.commit(2, now - age)
        source: object = path
        if kind == "server":
            words = ("serve", path, "--follow", "--port", "0")
            serve = stack.enter_context(running(*words, cwd=tmp_path))
            source = f"127.0.0.1:{serve.port()}"
        tail = stack.enter_context(
            running("tail", source, "--since", "10m", "--json", cwd=tmp_path)
        )
        found = [json.loads(tail.out.next() or "") for _ in range(4)]
        clock.commit(1, now + 1)
        found.append(json.loads(tail.out.next() or ""))
    assert [each["number"] for each in found] == [4, 5, 6, 7, 8]
    assert found[0]["time"] == moment_text(ms(now - 540.0))


def test_reassemble_from_a_time_on(invoke: Invoke, tmp_path: Path) -> None:
    path = write(tmp_path / "made.bin", *PAYLOADS)
    done = invoke("reassemble", path, "--from-time", "2026-11-29T07:01:30Z", "--json")
    assert done.code == 0, done
    assert [int(bytes.fromhex(each["id"][2:])[:16]) for each in done.objects] == [3, 4]
    old = write(tmp_path / "old.bin", (1, None), (2, 60.0))
    failed = invoke("reassemble", old, "--from-time", "2026-11-29")
    assert failed.code == 1
    words = "it is not known which entry was committed first at or after 2026-11-29T00:00:00"
    assert failed.err.splitlines()[-1].startswith(f"error: {old}: {words}")
