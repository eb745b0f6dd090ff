"""Whole worlds: one seed drives publishers, a server, relays, clients, and all that fails.

A failure prints the command that repeats it. `CONTRIBUTING.md` says how to read and shrink it.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings

from tests.world.faults import Plan, plan_of, plans, rotting_plans
from tests.world.world import Outcome, run

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    "seed", [0, 2, *(pytest.param(seed, marks=pytest.mark.soak) for seed in (1, 3))]
)
def test_a_minute(seed: int, record_property: Callable[[str, object], None]) -> None:
    found = run(plan_of(seed, 60))
    _report(found, record_property)
    assert found.entries
    assert found.acknowledged


@settings(
    max_examples=5,
    derandomize=True,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
@given(plan=plans)
def test_any_plan(plan: Plan) -> None:
    run(plan)


@pytest.mark.parametrize(
    "seed", [9, 22, *(pytest.param(seed, marks=pytest.mark.soak) for seed in (2, 10))]
)
def test_clients_that_know_all_servers(seed: int) -> None:
    """They come to a server that lags, has another history, or is lost as well."""
    assert run(replace(plan_of(seed, 60), relays=2, several=True)).entries


def test_changed_bits() -> None:
    """On disks of servers that run, and of others: no wrong byte reaches a client, a log names each
    damaged page, relays restore theirs, and every client has the right bytes in the end."""
    found = run(plan_of(59, 120))
    assert found.healed == found.flipped > 3
    assert found.damage


def test_changed_bits_of_relays() -> None:
    """The same if the origin changes and removes entries of the pages."""
    found = run(plan_of(71, 120))
    assert found.damage
    assert found.replaced


def test_a_seed_repeats_a_run(tmp_path: Path) -> None:
    """In processes whose hashes of strings are others, and with a truncation that ends several
    sessions."""
    commands = []
    for hash_seed in ("1", "2"):
        trace = ["--trace", str(tmp_path / hash_seed)]
        command = [sys.executable, "-m", "tests.world", "--seed", "4", "--seconds", "25", *trace]
        environment = {**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": str(ROOT)}
        commands.append(subprocess.Popen(command, cwd=ROOT, env=environment))
    run(plan_of(4, 25), trace_file=str(tmp_path / "here"))
    assert [command.wait() for command in commands] == [0, 0]
    traces = [(tmp_path / name).read_text() for name in ("here", "1", "2")]
    assert traces[0].count("connection ended: the stream was truncated") > 2
    assert traces[0] == traces[1] == traces[2]


def test_a_command_repeats_a_plan() -> None:
    plan = plan_of(3, 25)
    assert plan.command == "python -m tests.world --seed 3 --seconds 25"
    assert "--plan" in Plan(3, plan.events[:2]).command


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(100, 300))
def test_five_minutes(seed: int, record_property: Callable[[str, object], None]) -> None:
    _report(run(plan_of(seed, 300)), record_property)


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(4))
def test_an_hour(seed: int, record_property: Callable[[str, object], None]) -> None:
    _report(run(plan_of(seed, 3600)), record_property)


@pytest.mark.soak
@settings(
    max_examples=500,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
@given(plan=plans | rotting_plans)
def test_many_plans(plan: Plan) -> None:
    run(plan)


def _report(found: Outcome, record_property: Callable[[str, object], None]) -> None:
    """For a report of pytest (`--junit-xml`), and with `-s` for the eye."""
    record_property("cpu_seconds_per_simulated_hour", round(found.cpu_per_hour))
    print(f"{found.cpu_per_hour:.0f} s of CPU for an hour, {found.events} events")
