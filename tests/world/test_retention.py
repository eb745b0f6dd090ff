"""Local retention in whole worlds of archives: files whose oldest pages are in a bucket alone."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from datastreamer.archive import eviction
from datastreamer.archive.archiver import Archiver
from datastreamer.format import HEADER_PAGE_SIZE, page_start
from datastreamer.storage.read.evicted import PagedFile
from datastreamer.storage.write.floor import Floor
from tests.world import faults
from tests.world.archives import run
from tests.world.faults import Event, Plan, plan_of
from tests.world.planting import Patch, changed, nothing, replaced


@pytest.mark.parametrize(("seed", "seconds"), [(2, 20), (1, 20)])
def test_some_seconds_of_evictions(seed: int, seconds: float) -> None:
    """With two writers, and with a relay that archives."""
    found = run(plan_of(seed, seconds, evicts=True))
    assert found.counts["evictions"]
    assert found.counts["reads beside"]


def test_a_seed_repeats_a_run_of_evictions() -> None:
    plan = plan_of(4, 10, evicts=True)
    assert run(plan).digest == run(plan).digest


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(1000, 1100))
def test_minutes_of_evictions(seed: int) -> None:
    run(plan_of(seed, 120, evicts=True))


def _no_sync(write: Any) -> Any:
    def mutant(self: Floor, evicted: Any) -> None:
        file = self._owned.file
        sync, file.sync = file.sync, nothing  # type: ignore[method-assign]
        try:
            write(self, evicted)
        finally:
            file.sync = sync  # type: ignore[method-assign]

    return mutant


def _looks_before(self: PagedFile, size: int, offset: int) -> bytes:
    """A read that does not look at the floor again."""
    if offset + size <= HEADER_PAGE_SIZE:
        return super(PagedFile, self).read(size, offset)
    seen = self._look()
    data = super(PagedFile, self).read(size, offset)
    local = page_start(seen.floor)
    if not seen.floor or offset >= local:
        return data
    first = data[: max(0, HEADER_PAGE_SIZE - offset)]
    offset += len(first)
    found = self._evicted_at(seen).read(min(size - len(first), local - offset), offset)
    return first + found + data[len(first) + len(found) :]


@contextlib.contextmanager
def _brings_nothing_back(self: Floor, page: int) -> Iterator[Callable[[], None]]:
    yield lambda: None


def _lowers_at_once(lower: Any) -> Any:
    def mutant(self: Floor, page: int) -> None:
        file = self._owned.file
        sync = file.sync

        def skip() -> None:
            file.sync = sync  # type: ignore[method-assign]

        file.sync = skip  # type: ignore[method-assign]
        lower(self, page)

    return mutant


_CHANGES = (faults.TRUNCATE, faults.TRUNCATE, faults.UPDATE, faults.REST)

MUTANTS = [
    pytest.param(
        replaced(eviction, "_read_back", nothing), (faults.REST,), id="pages are not read back"
    ),
    pytest.param(
        changed(Floor, "_write", _no_sync),
        (faults.REST,),
        id="a hole is there before the floor is durable",
    ),
    pytest.param(
        replaced(Archiver, "_own_newest", lambda it: (it._writer._archive, it._writer.newest)),
        (faults.PUSH, faults.REST),
        id="an evicting writer does not look whether it is fenced",
    ),
    pytest.param(
        replaced(PagedFile, "read", _looks_before),
        (faults.REST,),
        id="a reader does not look at the floor after its read",
    ),
    pytest.param(
        replaced(Floor, "truncating", _brings_nothing_back),
        _CHANGES,
        id="a truncation does not bring its last page back",
    ),
    pytest.param(
        changed(Floor, "_lower", _lowers_at_once),
        _CHANGES,
        id="the floor falls before the pages are durable",
    ),
    pytest.param(
        replaced(Floor, "bringing_back", lambda *_: contextlib.nullcontext()),
        _CHANGES,
        id="an update changes a page below the floor",
    ),
]


@pytest.mark.mutants
@pytest.mark.parametrize(("patch", "kinds"), MUTANTS)
def test_is_found(patch: Patch, kinds: Sequence[str]) -> None:
    plans = [_plan(seed, kinds) for seed in range(2, 18)]
    run(next(plan for plan in plans if _is_found(patch, plan)))


def _plan(seed: int, kinds: Sequence[str]) -> Plan:
    chance = random.Random(seed)
    events = [
        Event(
            round(6 * chance.random(), 2), chance.choice(kinds), *chance.choices(range(1000), k=2)
        )
        for _ in range(14)
    ]
    return Plan(seed, tuple(events), relays=seed % 2, archives=True, evicts=True)


def _is_found(patch: Patch, plan: Plan) -> bool:
    with patch():
        try:
            run(plan)
        except Exception as error:  # noqa: BLE001
            print(f"{type(error).__name__}: {error}")
            return True
    return False
