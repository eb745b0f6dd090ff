"""Output on a terminal: tables and progress bars."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import pytest

from datastreamer.cli.shared import logs, progress
from datastreamer.cli.shared.exit_codes import guard
from datastreamer.cli.shared.progress import ProgressBar
from tests.cli.process import command, on_terminal


def test_tables_are_for_terminals(made: Path) -> None:
    code, shown = on_terminal(command("info", made.name), made.parent)
    assert code == 0
    lines = shown.splitlines()
    assert lines[0] == "made.bin"
    assert lines[2].split() == ["system", "id", "137"]
    assert any(line.split()[:2] == ["bookmark", "80"] for line in lines if line)

    code, shown = on_terminal(command("cat", made.name, "--count", "3"), made.parent, columns=60)
    assert code == 0
    assert shown.splitlines()[0].split() == ["NUMBER", "TYPE", "LENGTH", "DATA"]
    assert max(map(len, shown.splitlines())) == 60

    code, shown = on_terminal(command("entry", made.name, "1", "--json"), made.parent)
    assert (code, shown[:13]) == (0, '{"number": 1,')


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    "terminal, patience, wanted, shown",
    [
        (Terminal(), 0.0, True, True),
        (Terminal(), 0.0, False, False),
        (Terminal(), 1000.0, True, False),
        (io.StringIO(), 0.0, True, False),
    ],
)
def test_progress(
    monkeypatch: pytest.MonkeyPatch,
    terminal: io.StringIO,
    patience: float,
    wanted: bool,
    shown: bool,
) -> None:
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setattr(progress, "_DELAY", patience)
    with ProgressBar("reading", 10, enabled=wanted) as bar:
        for _ in range(10):
            bar.advance(1)
    assert ("reading" in terminal.getvalue()) == shown


def test_a_log_line_appears_whole_above_a_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setattr(progress, "_DELAY", 0.0)
    line = "a line that is longer than the terminal is wide: " + 100 * "x"
    with ProgressBar("writing", 10) as bar:
        bar.advance(1)
        logs.say(line)
        bar.advance(1)
    assert f"{line}\n" in terminal.getvalue()
    # The bar is drawn again below it.
    assert "20%" in terminal.getvalue().partition(line)[2]
    assert sys.stderr is terminal


def test_an_interruption_says_how_far_the_work_was(capsys: pytest.CaptureFixture[str]) -> None:
    def work() -> int:
        with ProgressBar("copying a.bin", 8, left="no copy is left") as bar:
            bar.advance(2)
            raise KeyboardInterrupt

    assert guard(work) == 130
    assert capsys.readouterr().err == (
        "error: interrupted while copying a.bin, 25 % done; no copy is left\n"
    )


def test_progress_that_learns_its_total(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setattr(progress, "_DELAY", 0.0)
    with ProgressBar("copying", 1) as bar:
        for done in (50, 100, 200):
            bar.reach(done, 200)
    assert "100%" in terminal.getvalue()
    assert "25%" in terminal.getvalue()
