"""The showcase, shortened: it runs to its end and reports what really happened."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from examples import showcase
from tests.cli.process import command, done, on_terminal, running

MODULE = "examples.showcase"


def test_runs(tmp_path: Path) -> None:
    words = ("--seconds", "2", "--rate", "30", "--history", "2000")
    shown = done(*words, cwd=tmp_path, module=MODULE)
    assert shown.returncode == 0, shown.stderr
    assert shown.stderr == ""
    lines = shown.stdout.splitlines()
    assert lines[0] == "the stream holds 10,000 entries; the writer now adds more"
    (written,) = (line.split() for line in lines if line.startswith(" written"))
    assert written[1] == "10,300"
    for client in ("client 1", "client 2", "client 3"):
        (row,) = (line.split() for line in lines if line.startswith(f" {client}"))
        assert row[2:5] == ["10,300", written[2], "equal"]
        assert row[6] == "entries/s"
        # p50 and p99; no entry was new to a client that caught up only at the end.
        assert row[7:] == ["-", "-"] or row[8] == row[10] == "ms"
    assert any(line.endswith("info demo.bin") for line in lines)
    assert list(tmp_path.iterdir()) == []


def test_draws_on_a_terminal(tmp_path: Path) -> None:
    words = ("--seconds", "1", "--rate", "30", "--history", "100")
    code, shown = on_terminal(command(*words, module=MODULE), tmp_path)
    assert code == 0, shown
    assert "One process writes 30 operations/s" in shown
    assert shown.count("has all") >= 3
    assert shown.count("equal") == 3


def test_reports_digests_that_differ(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(showcase, "digest_of", lambda batches: "0" * 64)
    with pytest.raises(SystemExit, match="client 1 and client 2 and client 3 did not receive"):
        showcase.run(seconds=1, rate=20, history=10)
    assert capsys.readouterr().out.count("differs") == 3


def test_reports_a_client_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(showcase.Watcher, "join", lambda *_: None)
    with pytest.raises(SystemExit, match="client 1 stopped at entry 0 of the stream"):
        showcase.run(seconds=1, rate=5, history=0)


def test_a_signal_ends_it(tmp_path: Path) -> None:
    with running("--seconds", "60", cwd=tmp_path, module=MODULE) as playing:
        playing.out.until("client 1 live")
        playing.signal(signal.SIGINT)
        assert playing.wait() == 1
        assert playing.err.rest() == ["error: interrupted"]
