"""Commands load when they are used, and load no more than they use."""

from __future__ import annotations

import inspect
import subprocess
import sys

import pytest
import typer

from datastreamer.cli.commands.groups import Commands
from datastreamer.cli.program import commands, program
from datastreamer.cli.verbs import context, spark, zkevm
from tests.cli.process import ENVIRONMENT

SHOW = "import sys; sys.argv[1:] = {words!r}; from datastreamer.cli.main import main; main(); "
GROUPS = {"zkevm": zkevm, "spark": spark, "context": context}


@pytest.mark.parametrize(
    "words, absent",
    [
        (["--help"], ["datastreamer.cli.verbs", "datastreamer.storage", "pydantic"]),
        (["--version"], ["typer", "logging"]),
        (
            ["info", "127.0.0.1:1"],
            ["trio", "lmdb", "pydantic", "datastreamer.storage", "datastreamer.server"],
        ),
    ],
    ids=lambda value: value[0],
)
def test_what_a_command_leaves_out(words: list[str], absent: list[str]) -> None:
    code = SHOW.format(words=words) + "print(*sys.modules, file=sys.stderr)"
    done = subprocess.run(
        [sys.executable, "-c", code], env=ENVIRONMENT, capture_output=True, text=True, check=True
    )
    loaded = done.stderr.splitlines()[-1].split()
    assert "datastreamer.cli.main" in loaded
    assert [name for name in absent if name in loaded] == []


def every_command() -> dict[str, tuple[str, object]]:
    """Summary and function of each command, by its words."""
    found: dict[str, tuple[str, object]] = {}
    for name, summary in commands().summaries.items():
        made = commands().made(name)
        found[name] = summary, made
        if isinstance(made, typer.Typer):
            del found[name]
            inner: Commands = typer.main.get_command(made).commands  # type: ignore[attr-defined]
            for below, text in inner.summaries.items():
                found[f"{name} {below}"] = text, inner.made(below)
    return found


EVERY = every_command()


@pytest.mark.parametrize("name", EVERY)
def test_the_summary_and_two_examples(name: str) -> None:
    summary, function = EVERY[name]
    text = inspect.getdoc(function) or ""
    first = text.splitlines()[0]
    assert first.startswith(summary.removesuffix("."))
    assert len(summary) <= 62  # with its name, in 80 columns
    _, colon, examples = text.partition("\nExamples:\n")
    lines = examples.splitlines()
    assert colon
    assert len(lines) == 2
    assert f"datastreamer {name}" in lines[0]
    assert all("datastreamer " in line for line in lines)


def test_help_fits_into_80_columns(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from datastreamer.cli.main import main

    monkeypatch.setenv("COLUMNS", "80")
    for name in ("", *EVERY):
        assert main([*name.split(), "--help"]) == 0
        shown = capsys.readouterr().out
        assert "..." not in shown.split("Options:")[-1].replace("0x...", "")
        assert "[default: " not in shown
        assert [line for line in shown.splitlines() if len(line) > 80] == []


def test_the_program_has_its_commands() -> None:
    assert [*typer.main.get_command(program).commands] == [*commands()]  # type: ignore[attr-defined]
    assert commands().get("nonsense") is None
    assert len(commands()) > 20
