"""The units: valid, in a sandbox, with options that exist."""

from __future__ import annotations

import re
import shlex
import subprocess
import tomllib
from configparser import ConfigParser
from pathlib import Path

import pytest
import typer
import yaml

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


def test_what_prometheus_scrapes_is_open() -> None:
    words = [shlex.split(service(unit)["ExecStart"]) for unit in UNITS]
    ports = {each[each.index("--metrics-port") + 1] for each in words}
    config = yaml.safe_load((FOLDER.parent / "prometheus" / "prometheus.yml").read_text())
    [job] = config["scrape_configs"]
    [static] = job["static_configs"]
    assert {each.rpartition(":")[2] for each in static["targets"]} == ports
    assert len(ports) == len(UNITS)


def test_each_way_to_run_it_has_the_same_time_to_end() -> None:
    """--grace of units, containers and pods; what ends them waits longer."""
    grace, longer = set(), set()
    for unit in UNITS:
        words = shlex.split(service(unit)["ExecStart"])
        grace.add(int(words[words.index("--grace") + 1]))
        longer.add(int(service(unit)["TimeoutStopSec"]))
    docker = FOLDER.parent / "docker"
    services = yaml.safe_load((docker / "compose.yaml").read_text())["services"]
    words = services["relay-1"]["command"]
    grace.add(int(words[words.index("--grace") + 1]))
    grace.add(tomllib.loads((docker / "relay.toml").read_text())["grace"])
    longer |= {
        int(services[name]["stop_grace_period"].removesuffix("s"))
        for name in ("relay-1", "relay-2")
    }
    text = (FOLDER.parent / "kubernetes" / "relay.yaml").read_text()
    grace |= {int(each) for each in re.findall(r"--grace=(\d+)", text)}
    longer |= {int(each) for each in re.findall(r"terminationGracePeriodSeconds: (\d+)", text)}
    assert grace == {20}
    assert min(longer) > 20


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
