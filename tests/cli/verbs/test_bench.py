"""`bench`: its figures and formats."""

from __future__ import annotations

from pathlib import Path

import pytest

from datastreamer.server.publish.policy import Publishing
from datastreamer.service.embedded import StreamServer
from tests.cli.conftest import Invoke

SHORT = ("--seconds", "0.01")


def test_figures(invoke: Invoke, tmp_path: Path) -> None:
    done = invoke("bench", "--folder", tmp_path, *SHORT, "--json")
    assert (done.code, done.err) == (0, "")
    assert [set(each) for each in done.objects] == [{"work", "figure", "unit"}] * 7
    assert all(each["figure"] > 0 for each in done.objects)
    assert {each["unit"] for each in done.objects} == {"entries/s", "operations/s"}
    assert not list(tmp_path.iterdir())


def test_of_a_server(invoke: Invoke, server: str) -> None:
    done = invoke("bench", server, *SHORT, "--json")
    assert done.code == 0
    assert done.err.startswith("live latency was not measured: ")
    units = [each["unit"] for each in done.objects]
    assert units == [*4 * ["ms"], "entries/s", "MB/s", "entries/s"]
    *measured, committed = done.objects
    assert all(each["figure"] > 0 for each in measured)
    assert committed == {"work": "committed", "figure": 0, "unit": "entries/s"}
    assert "cannot connect" in invoke("bench", "127.0.0.1:1", *SHORT).failed()


def test_live_latency_of_a_server(invoke: Invoke, tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("a token")
    token.chmod(0o600)
    with StreamServer(
        tmp_path / "s.bin",
        host="127.0.0.1",
        port=0,
        in_process=True,
        publishing=Publishing(token_file=token),
    ) as served:
        address = f"127.0.0.1:{served.port}"
        done = invoke("bench", address, *SHORT, "--json", "--publish-token-file", token)
        assert done.code == 0, done.err
        assert "not measured" not in done.err
        *_, median, high = done.objects
        assert median["work"] == "commit to a live client, one by one, median"
        assert 0 < median["figure"] <= high["figure"]
        assert served.stream.total_entries >= 2
        assert served.stream.entry(0).data == bytes(200)
    refused = invoke("bench", "--folder", tmp_path, "--publish-token-file", token)
    assert "is for a server" in refused.failed(2)


def test_a_table(invoke: Invoke, tmp_path: Path) -> None:
    done = invoke("bench", "--folder", tmp_path, *SHORT, "--format", "table")
    assert (done.code, done.err) == (0, "")
    words = [" ".join(line.split()) for line in done.lines]
    assert any("work" in line and "figure" in line and "unit" in line for line in words)
    assert sum("/s" in line for line in words) == 7


@pytest.mark.parametrize("seconds", ["0", "-1", "61", "nan", "soon"])
def test_invalid_seconds(invoke: Invoke, seconds: str) -> None:
    done = invoke("bench", f"--seconds={seconds}")
    assert done.code == 2
    assert f"it is a number of seconds from 0.01 to 60, not '{seconds}'" in done.err


def test_a_missing_folder(invoke: Invoke, tmp_path: Path) -> None:
    missing = tmp_path / "missing"
    assert invoke("bench", "--folder", missing).failed() == f"{missing}: no such folder"
