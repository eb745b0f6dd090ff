"""What shells are offered, and their scripts."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from datastreamer.cli.commands.completion import FILES, SCRIPTS, completions
from datastreamer.cli.commands.contexts import remember_server, write_contexts
from datastreamer.cli.program import commands
from tests.cli.conftest import Invoke
from tests.cli.process import ENVIRONMENT


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


def test_scripts(invoke: Invoke) -> None:
    for shell, script in SCRIPTS.items():
        assert invoke("completion", shell).out == script.encode()
    assert "'sh' is not one of 'bash', 'zsh', 'fish'" in invoke("completion", "sh").failed(2)


@pytest.mark.parametrize("shell", SCRIPTS)
def test_scripts_parse(shell: str) -> None:
    program = shutil.which(shell)
    if program is None:
        pytest.skip(f"needs {shell}")
    subprocess.run([program, "-n"], input=SCRIPTS[shell], text=True, check=True)


ASK = """
datastreamer() { "$PYTHON" -m datastreamer "$@"; }
source /dev/stdin <<< "$SCRIPT"
COMP_LINE="$LINE" COMP_POINT=${#LINE} COMP_WORDBREAKS=$' :'
_datastreamer datastreamer
printf '%s\\n' "${COMPREPLY[@]}"
"""


@pytest.mark.parametrize(
    "line, found",
    [
        ("datastreamer cat --format t", ["table"]),
        # bash replaces what follows the last colon.
        ("datastreamer cat seen:", ["7"]),
        ("datastreamer cat file", ["file.bin"]),
    ],
)
def test_bash(home: Path, line: str, found: list[str]) -> None:
    bash = shutil.which("bash")
    assert bash is not None
    remember_server("seen:7")
    (home / "file.bin").touch()
    done = subprocess.run(
        [bash, "-c", ASK],
        env={
            **os.environ,
            **ENVIRONMENT,
            "XDG_STATE_HOME": str(home),
            "PYTHON": sys.executable,
            "SCRIPT": SCRIPTS["bash"],
            "LINE": line,
        },
        cwd=home,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split() == found
