"""The units: valid, in a sandbox, with options that exist."""

from __future__ import annotations

import re
import shlex
import subprocess
from configparser import ConfigParser
from pathlib import Path

import pytest
import typer

from datastreamer.cli.program import program
from tests.programs import needs

FOLDER = Path(__file__).resolve().parent.parent / "contrib" / "systemd"
UNITS = sorted(FOLDER.glob("*.service"))


def service(unit: Path) -> dict[str, str]:
    """The settings of the service; the last one if there are several of a name."""
    parser = ConfigParser(strict=False, interpolation=None)
    parser.optionxform = str  # type: ignore[assignment, method-assign]
    parser.read(unit)
    return dict(parser["Service"])


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.name)
def test_the_command_exists(unit: Path) -> None:
    _, verb, *words = shlex.split(service(unit)["ExecStart"])
    command = typer.main.get_command(program).commands[verb]  # type: ignore[attr-defined]
    known = {name for each in command.params for name in each.opts}
    assert {word for word in words if word.startswith("--")} <= known


def test_the_services_have_one_sandbox() -> None:
    first, second = (service(unit) for unit in UNITS)
    different = {name for name in first | second if first.get(name) != second.get(name)}
    assert different == {"ExecStart", "StateDirectory", "TimeoutStartSec"}


@needs("systemd-analyze")
@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.name)
def test_the_sandbox_is_tight(unit: Path) -> None:
    # Up to 5.0 is "MEDIUM"; the network of the host is 1.2 of what is left.
    words = ["systemd-analyze", "security", "--no-pager", "--offline=yes", "--threshold=15"]
    done = subprocess.run([*words, str(unit)], check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@needs("systemd-analyze")
def test_systemd_reads_the_units() -> None:
    words = ["systemd-analyze", "verify", "--man=no", *map(str, sorted(FOLDER.glob("*.s*[et]")))]
    done = subprocess.run(words, check=False, capture_output=True, text=True)
    said = re.sub(
        ".*Command /opt/datastreamer/bin/datastreamer is not executable.*\n", "", done.stderr
    )
    assert said == ""
