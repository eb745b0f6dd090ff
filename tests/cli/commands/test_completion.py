"""What shells are offered, and their scripts."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import pytest

from datastreamer.cli.commands.completion import FILES, SCRIPTS, completions
from datastreamer.cli.commands.contexts import remember_server, write_contexts
from datastreamer.cli.program import commands
from tests.cli.conftest import Invoke
from tests.cli.process import ENVIRONMENT, terminal
from tests.programs import missing


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("XDG_CONFIG_HOME", "XDG_STATE_HOME"):
        monkeypatch.setenv(name, str(tmp_path))
    return tmp_path


def words(line: str) -> list[str]:
    return [each.partition("\t")[0] for each in completions(f"datastreamer {line}", commands())]


@pytest.mark.parametrize(
    "line, found",
    [
        ("sna", ["snapshot"]),
        ("--log-level debug ver", ["verify"]),
        ("--ver", ["--version"]),
        ("zkevm b", ["batch", "block"]),
        ("cat --format ", ["table", "jsonl", "hex", "raw"]),
        ("cat --format j", ["jsonl"]),
        ("cat s.bin --to", ["--to", "--to-bookmark"]),
        ("cat --log-level d", ["debug"]),
        ("cat --json ", [FILES]),
        ("cat --tls-ca ", [FILES]),
        ("completion ", ["bash", "zsh", "fish"]),
        ("serve s", [FILES]),
        ("nonsense ", []),
        ("cat 'open", []),
    ],
)
def test_what_is_offered(line: str, found: list[str]) -> None:
    assert words(line) == found


def test_servers_and_contexts(monkeypatch: pytest.MonkeyPatch) -> None:
    remember_server("seen:7")
    write_contexts({"prod": {"server": "prod:1"}})
    monkeypatch.setenv("DATASTREAMER_SERVER", "named")
    assert words("cat ") == ["named", "seen:7", FILES]
    assert words("cat --context ") == ["prod"]
    assert words("relay --server ") == ["seen:7"]


def test_scripts(invoke: Invoke) -> None:
    for shell, script in SCRIPTS.items():
        assert invoke("completion", shell).out == script.encode()
    assert "'sh' is not one of 'bash', 'zsh', 'fish'" in invoke("completion", "sh").failed(2)


PROGRAM = """#!/bin/sh
# Completes as the program does, and prints the words that it is run with.
[ -n "$_DATASTREAMER_COMPLETE" ] || [ "$1" = completion ] || { printf 'ran <%s>\\n' "$*"; exit; }
exec "$PYTHON" -m datastreamer "$@"
"""
# The words of a shell, and its file of settings with the lines that docs/CLI.md shows.
SHELLS = {
    "bash": (
        ["--rcfile", ".bashrc", "-i"],
        ".bashrc",
        "source <(datastreamer completion bash)\nPS1='READY> '\n",
    ),
    "zsh": (
        ["-i"],
        ".zshrc",
        """autoload -Uz compinit; compinit -u -D
source <(datastreamer completion zsh)
PS1='READY> '
""",
    ),
    "fish": (
        ["-i"],
        "fish/config.fish",
        """datastreamer completion fish | source
function fish_greeting; end
function fish_prompt; echo 'READY> '; end
""",
    ),
}


@pytest.mark.parametrize("shell", SHELLS)
def test_in_a_shell(home: Path, shell: str) -> None:
    """Each line is typed on a terminal, with Tab at its end."""
    path = shutil.which(shell)
    if path is None or missing("setsid"):
        pytest.skip(missing(shell) or missing("setsid"))
    remember_server("seen:7")
    (home / "a file.bin").touch()
    program = home / "bin" / "datastreamer"
    program.parent.mkdir()
    program.write_text(PROGRAM)
    program.chmod(0o755)
    words, settings, text = SHELLS[shell]
    (home / settings).parent.mkdir(exist_ok=True)
    (home / settings).write_text(text)
    environment = {
        **ENVIRONMENT,
        "PATH": f"{program.parent}:{os.environ['PATH']}",
        "PYTHON": sys.executable,
        "TERM": "dumb",
        **dict.fromkeys(("HOME", "ZDOTDIR", "XDG_CONFIG_HOME", "XDG_STATE_HOME"), str(home)),
    }
    with terminal([path, *words], home, environment) as (read_until, write):
        for typed, ran in (
            ("cat --format ta", "cat --format table"),
            ("snaps", "snapshot"),
            ("info se", "info seen:7"),
            ("info seen:", "info seen:7"),
            ("info a", "info a file.bin"),
        ):
            read_until("READY> ")
            write(f"datastreamer {typed}\t\r")
            assert read_until("ran <(.*?)>").rstrip() == ran
