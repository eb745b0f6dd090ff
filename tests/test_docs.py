"""What the documentation says is so: its commands, options, files and outputs are the program's."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from datastreamer import StreamServer
from datastreamer.cli.dsapp.program import program as dsapp
from datastreamer.cli.program import program as datastreamer

ROOT = Path(__file__).resolve().parent.parent
PAGES = [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), ROOT / "bench" / "README.md"]
BLOCK = re.compile(r"^ *```sh\n(.*?)^ *```", re.MULTILINE | re.DOTALL)
SCRIPTS = [
    (page, script)
    for page in PAGES
    for script in BLOCK.findall(page.read_text())
    if "# prints {" in script
]
PROGRAMS = {"datastreamer": datastreamer, "dsapp": dsapp}
# Options of other programs.
FOREIGN = {"--py-files"}


def options_of(command: Any) -> set[str]:
    """The options of a command and of those below it."""
    found = {name for each in command.params for name in (*each.opts, *each.secondary_opts)}
    for below in getattr(command, "commands", {}).values():
        found |= options_of(below)
    return {*found, "--help", "-h"}


def calls(script: str) -> Iterator[list[str]]:
    """The words of each call of our programs in a script."""
    script = re.sub(r"<<'EOF'\n.*?^EOF$", "", script, flags=re.MULTILINE | re.DOTALL)
    for line in script.replace("\\\n", " ").splitlines():
        for part in re.split(r" \||&& ", line):
            words = shlex.split(part, comments=True)
            if words and Path(words[0]).name in PROGRAMS:
                yield [Path(words[0]).name, *words[1:]]


def unknown(call: list[str]) -> list[str]:
    """The verb of a call if there is no such verb, or the options that its verb does not have."""
    command: Any = typer.main.get_command(PROGRAMS[call[0]])
    words = call[1:]
    while hasattr(command, "commands"):
        verb = words.pop(0)
        if verb not in command.commands:
            return [verb]
        command = command.commands[verb]
    known = options_of(command)
    return [word for word in words if re.match("--[a-z]", word) and word not in known]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_and_options_exist(page: Path) -> None:
    text = page.read_text()
    for script in BLOCK.findall(text):
        for call in calls(script):
            assert unknown(call) == [], call
    every = {option for each in PROGRAMS.values() for option in options(each)}
    named = set(re.findall(r"`(?:\w+ )?(--[a-z][a-z-]+)", text))
    if page.parent.name == "docs" or page.name in ("README.md", "SECURITY.md"):
        assert named - every - FOREIGN - {"--benchmark-disable"} == set()


def options(program: typer.Typer) -> set[str]:
    return options_of(typer.main.get_command(program))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_named_files_exist(page: Path) -> None:
    named = re.findall(
        r"`([\w./]+/[\w.]+\.(?:pyx?|go|md|yml|json|service|socket))`", page.read_text()
    )
    homes = (ROOT, ROOT / "datastreamer", page.parent)
    lost = [name for name in named if not any((home / name).exists() for home in homes)]
    assert [name for name in lost if "NAME" not in name] == []


@pytest.mark.parametrize("page, script", SCRIPTS, ids=lambda value: getattr(value, "name", ""))
def test_scripts_print_what_the_page_says(page: Path, script: str, tmp_path: Path) -> None:
    folder = Path(sys.executable).parent
    done = subprocess.run(
        ["bash", "-c", script.replace(".venv/bin/datastreamer", "datastreamer")],
        check=False,
        capture_output=True,
        text=True,
        timeout=60,
        cwd=tmp_path,
        env={**os.environ, "PATH": f"{folder}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stderr
    [said] = re.findall(r"# prints (.*)", script)
    pattern = re.escape(said).replace(re.escape("..."), ".*")
    assert re.fullmatch(pattern, done.stdout.strip()), done.stdout


@pytest.mark.parametrize("name, number", [("README", 1), ("docs/CLIENTS", 0), ("docs/CLIENTS", 1)])
def test_clients_run_as_shown(name: str, number: int, tmp_path: Path) -> None:
    text = (ROOT / f"{name}.md").read_text()
    block = re.findall(r"```python\n(.*?)```", text, re.DOTALL)[number]
    with StreamServer(tmp_path / "s.bin", host="127.0.0.1", port=0) as server:
        with server.stream.atomic_op() as op:
            op.add_entries(2, [b"one", b"two", b"three"])
        program = block.replace("6900", str(server.port)).replace("entry=0", "entry=0, stop=3")
        assert printed(program, tmp_path) == "0 3 11\n"


def test_the_library_runs_as_shown(tmp_path: Path) -> None:
    text = (ROOT / "docs" / "API.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert "the block" in printed(blocks[0], tmp_path)
    [serving] = (block for block in blocks if "nursery" in block)
    assert "serving on " in printed(serving, tmp_path)


def printed(program: str, folder: Path) -> str:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", program],
        check=False,
        capture_output=True,
        text=True,
        timeout=60,
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def test_the_quick_start_runs(tmp_path: Path) -> None:
    """README's commands up to the server, which the tests of `serve` run."""
    text = (ROOT / "README.md").read_text()
    lines = re.findall(r"^\.venv/bin/(datastreamer (?:demo|info) .*)$", text, re.MULTILINE)
    assert len(lines) == 2
    for line in lines:
        words = [sys.executable, "-m", *shlex.split(line)]
        done = subprocess.run(
            words,
            check=False,
            capture_output=True,
            timeout=60,
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )
        assert done.returncode == 0, done.stderr


def test_finds_what_does_not_exist() -> None:
    script = (
        "x | datastreamer cat FILE --nonsense --count 5\ndsapp server\ndatastreamer zkevm no X\n"
    )
    assert [unknown(call) for call in calls(script)] == [["--nonsense"], [], ["no"]]
