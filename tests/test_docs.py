"""What the documentation names exists: commands, options and files."""

from __future__ import annotations

import functools
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from datastreamer.cli.dsapp.program import program as dsapp
from datastreamer.cli.program import program as datastreamer

ROOT = Path(__file__).resolve().parent.parent
PAGES = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), ROOT / "bench" / "README.md"]
BLOCK = re.compile(r"^ *```sh\n(.*?)^ *```", re.MULTILINE | re.DOTALL)
PROGRAMS = {
    name: typer.main.get_command(program)
    for name, program in (("datastreamer", datastreamer), ("dsapp", dsapp))
}
# Options of other programs.
FOREIGN = {"--archives", "--jars", "--py-files"}


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
    command: Any = PROGRAMS[call[0]]
    words = call[1:]
    while hasattr(command, "commands") and not words[0].startswith("--"):
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
    named = set(re.findall(r"`(?:\w+ )?(--[a-z][a-z-]+)", text))
    if ROOT / "docs" in page.parents or page.name in ("README.md", "SECURITY.md"):
        assert named - every_option() - FOREIGN - {"--benchmark-disable"} == set()


@functools.cache
def every_option() -> set[str]:
    return {option for program in PROGRAMS.values() for option in options_of(program)}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_named_files_exist(page: Path) -> None:
    named = re.findall(
        r"`([\w./]+/[\w.]+\.(?:pyx?|go|md|yml|json|service|socket))`", page.read_text()
    )
    homes = (ROOT, ROOT / "datastreamer", page.parent)
    lost = [name for name in named if not any((home / name).exists() for home in homes)]
    assert [name for name in lost if "NAME" not in name] == []


def test_finds_what_does_not_exist() -> None:
    script = (
        "x | datastreamer cat FILE --nonsense --count 5\ndsapp server\ndatastreamer zkevm no X\n"
    )
    assert [unknown(call) for call in calls(script)] == [["--nonsense"], [], ["no"]]
