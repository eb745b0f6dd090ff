"""Whole worlds: one seed drives publishers, a server, relays, clients, and all that fails.

A failure prints the command that repeats it. `CONTRIBUTING.md` says how to read and shrink it.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings

from tests.world.faults import Plan, plan_of, plans, rotting_plans
from tests.world.world import Outcome, run

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("seed", range(6))
def test_a_minute(seed: int, record_property: Callable[[str, object], None]) -> None:
    found = run(plan_of(seed, 60))
    _report(found, record_property)
    assert found.entries
    assert found.acknowledged


@settings(
    max_examples=10,
    derandomize=True,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
@given(plan=plans)
def test_any_plan(plan: Plan) -> None:
    run(plan)


def test_changed_bits() -> None:
    """The wrong bytes reach nobody, and everybody has the right ones after a repair."""
    found = run(plan_of(19, 120))
    assert found.flipped
    assert found.damage


def test_changed_bits_of_relays() -> None:
    """The same if the origin changes and removes entries of the pages."""
    found = run(plan_of(55, 120))
    assert found.damage
    assert found.replaced


def test_a_seed_repeats_a_run() -> None:
    """Also in another process, whose hashes of strings are others."""
    first, second = run(plan_of(3, 25)), run(plan_of(3, 25))
    assert (first.digest, first.events) == (second.digest, second.events)
    found = subprocess.run(
        [sys.executable, "-m", "tests.world", "--seed", "3", "--seconds", "25"],
        cwd=ROOT,
        env={**os.environ, "PYTHONHASHSEED": "7", "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    assert found.stdout.startswith(first.digest)
    assert run(plan_of(4, 25)).digest != first.digest


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
