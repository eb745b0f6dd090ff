"""Consumers of portions in whole worlds: they are given what consumers of everything are given."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from datastreamer.consumer import options
from datastreamer.consumer.sources import _SourceReader
from datastreamer.reassembly.merge import Merge
from tests.world import faults
from tests.world.faults import Event, Plan, plan_of
from tests.world.model import Wrong
from tests.world.planting import Patch, changed
from tests.world.portions import run


@pytest.mark.parametrize("seed", [1, pytest.param(0, marks=pytest.mark.soak)])
def test_a_minute_of_portions(seed: int) -> None:
    found = run(plan_of(seed, 60, portions=True))
    assert found.acknowledged > 15


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(4))
def test_an_hour_of_portions(seed: int) -> None:
    found = run(plan_of(seed, 3600, portions=True))
    print(f"{found.cpu_per_hour:.0f} s of CPU for an hour, {found.events} events")
    assert found.rollbacks


def _cuts_by_index(receive: Any) -> Any:
    def mutant(self: Merge, source: str, batch: Any, read: Any, now: Any = None) -> Any:
        behind = self._floors.get(source, 0) - batch.first_number
        return receive(self, source, batch[behind:] if behind > 0 else batch, read, now)

    return mutant


def _counts_entries(send: Any) -> Any:
    def mutant(self: _SourceReader, batch: Any, read: Any) -> Any:
        at = batch.first_number + len(batch)
        return send(self, batch, replace(read, next_entry=at, trail=b"", chosen=None))

    return mutant


def _passes_over_empty_ones(send: Any) -> Any:
    return lambda self, batch, read: send(self, batch, read) if len(batch) else iter(())


MUTANTS = [
    pytest.param(
        changed(Merge, "receive", _cuts_by_index),
        (faults.KILL,),
        id="a batch with gaps is cut by index",
    ),
    pytest.param(
        changed(_SourceReader, "_send_batch", _counts_entries),
        (faults.REST,),
        id="positions move by index",
    ),
    pytest.param(
        changed(_SourceReader, "_send_batch", _passes_over_empty_ones),
        (faults.REST,),
        id="a batch without entries does not move the position",
    ),
    pytest.param(
        changed(options, "wanted", lambda wanted: lambda names, kind: wanted(names[:-1], kind)),
        (faults.REST,),
        id="nested headers are not asked for",
    ),
]


@pytest.mark.mutants
@pytest.mark.parametrize(("patch", "kinds"), MUTANTS)
def test_is_found(patch: Patch, kinds: Sequence[str]) -> None:
    plans = [_plan(seed, kinds) for seed in range(1, 6)]
    run(next(plan for plan in plans if _is_found(patch, plan)))


def _plan(seed: int, kinds: Sequence[str]) -> Plan:
    chance = random.Random(seed)
    events = [
        Event(round(5 * chance.random(), 2), chance.choice(kinds), chance.randrange(1000), 5)
        for _ in range(12)
    ]
    return Plan(seed, tuple(events), portions=True)


def _is_found(patch: Patch, plan: Plan) -> bool:
    with patch():
        try:
            run(plan)
        except Wrong:
            return True
    return False
