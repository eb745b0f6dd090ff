"""The world bites: each fault that is planted in the package is found."""

from __future__ import annotations

import functools

import pytest

from tests.world.clock import StandsStill
from tests.world.faults import Plan
from tests.world.model import Wrong
from tests.world.mutants import MUTANTS
from tests.world.planting import Mutant
from tests.world.world import run

_TRIES = 10
_PLANS = 40
_SHARE = 0.1

mutants = pytest.mark.parametrize("mutant", MUTANTS, ids=lambda each: each.name)
pytestmark = [
    pytest.mark.mutants,
    # A run that fails leaves connections open.
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]


@mutants
def test_is_found(mutant: Mutant) -> None:
    # Usually by the first plan; a change of the package may turn that into another.
    plans = map(mutant.plan, range(mutant.seed, mutant.seed + _TRIES))
    plan = next(plan for plan in plans if _is_found(mutant, plan))
    _find_nothing(plan)


@pytest.mark.soak
@mutants
def test_is_found_by_some(mutant: Mutant) -> None:
    """Not by one plan alone."""
    found = sum(_is_found(mutant, mutant.plan(seed)) for seed in range(_PLANS))
    print(f"{found} of {_PLANS} plans find that {mutant.name}")
    assert found >= _PLANS * _SHARE


@functools.cache
def _find_nothing(plan: Plan) -> None:
    """Carry out a plan without a mutant. Several have the same."""
    run(plan)


def _is_found(mutant: Mutant, plan: Plan) -> bool:
    with mutant.patch():
        try:
            run(plan)
        except (Wrong, StandsStill, LookupError):  # the last: a program with the fault ends so
            return True
    return False
