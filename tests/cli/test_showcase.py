"""The showcase, shortened: it plays to its end and tells the truth."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from datastreamer.cli.shared.exit_codes import Failure
from datastreamer.cli.showcase import play
from datastreamer.cli.showcase.audience import Watcher
from tests.cli.process import done, running

MODULE = "datastreamer.cli.showcase"
SHORT = ("--seconds", "2", "--rate", "30", "--history", "2000")


def test_plays(tmp_path: Path) -> None:
    shown = done(*SHORT, cwd=tmp_path, module=MODULE)
    assert shown.returncode == 0, shown.stderr
    assert shown.stderr == ""
    lines = shown.stdout.splitlines()
    assert lines[0] == "the stream holds 10,000 entries; more are written now"
    (written,) = (line.split() for line in lines if line.startswith(" written"))
    assert written[1] == "10,300"
    for client in ("client 1", "client 2", "client 3"):
        (row,) = (line.split() for line in lines if line.startswith(f" {client}"))
        assert row[2:5] == ["10,300", written[2], "equal"]
        assert row[6] == "entries/s"
        assert row[8] == row[10] == "ms"
    assert any(line.endswith("info demo.bin") for line in lines)
    assert list(tmp_path.iterdir()) == []


def test_says_when_the_digests_differ(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(play, "_digest", lambda stream: "0" * 64)
    with pytest.raises(Failure, match="client 1 and client 2 and client 3 did not receive"):
        play.showcase(seconds=1, rate=20, history=10)
    assert capsys.readouterr().out.count("differs") == 3


def test_says_when_a_client_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Watcher, "join", lambda *_: None)
    with pytest.raises(Failure, match="client 1 stopped at entry 0 of the stream"):
        play.showcase(seconds=1, rate=5, history=0)


def test_a_signal_ends_it(tmp_path: Path) -> None:
    with running("--seconds", "60", cwd=tmp_path, module=MODULE) as playing:
        playing.out.until("client 1 live")
        playing.signal(signal.SIGINT)
        assert playing.wait() == 1
        assert playing.err.rest() == ["error: ended before its end"]
