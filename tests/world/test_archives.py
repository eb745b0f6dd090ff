"""Archives in whole worlds: two writers or a relay, a follower, and a bucket that fails."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest

from datastreamer.archive import archived_file, follower, restore, writer
from datastreamer.archive.writer import ArchiveWriter
from datastreamer.errors import StreamBusy
from datastreamer.storage.objects import store
from datastreamer.storage.objects.store import Store
from tests.storage.lab.disk import Process, Unsettled
from tests.world import archives, faults
from tests.world.archives import _ACTIONS, ArchiveWorld, run
from tests.world.drivers import name_here
from tests.world.faults import Event, Plan, plan_of
from tests.world.planting import Patch, changed, replaced
from tests.world.servers import PATH


@pytest.mark.parametrize(("seed", "seconds"), [(4, 25), (1, 5)])
def test_some_seconds_of_archives(seed: int, seconds: float) -> None:
    """With two writers, and with a relay that archives."""
    found = run(plan_of(seed, seconds, archives=True))
    assert found.acknowledged > 4
    assert found.injected


def test_a_seed_repeats_a_run_of_archives() -> None:
    plan = plan_of(16, 15, archives=True)
    assert run(plan).digest == run(plan).digest


def test_a_push_beside_a_restore_that_has_not_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """The file has its name, and a power cut takes that: the archive has all that is in it."""
    worlds: list[ArchiveWorld] = []
    left: list[list[str]] = []
    publish, restores = Process.publish, ArchiveWorld.restore

    def takes_all(things: Sequence[Unsettled]) -> list[int]:
        return [0] * len(things)

    def published(self: Process, temporary: str, path: str) -> None:
        def watch(what: str) -> None:
            if what == "sync folder":
                self.disk.watch = None
                left.append(self.disk.power_cut(takes_all).names())
                worlds[0]._push(worlds[0].machines[name_here.get()], takeover=True)

        if temporary.endswith(restore.STAGING) and worlds and not left:
            self.disk.watch = watch
        publish(self, temporary, path)

    def restored(world: ArchiveWorld, event: Event) -> None:
        worlds.append(world)
        restores(world, event)

    monkeypatch.setattr(Process, "publish", published)
    monkeypatch.setattr(archives, "Cut", lambda *_: takes_all)
    monkeypatch.setitem(_ACTIONS, faults.RESTORE, restored)
    events = Event(9.0, faults.RESTORE, 0, 1), Event(9.0, faults.REST, 0, 0)
    run(Plan(3, events, relays=0, archives=True))
    assert [PATH in names for names in left] == [False]


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(100, 200))
def test_minutes_of_archives(seed: int) -> None:
    run(plan_of(seed, 120, archives=True))


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(3))
def test_half_an_hour_of_archives(seed: int) -> None:
    found = run(plan_of(seed, 1800, archives=True))
    assert found.rollbacks > 3
    assert found.injected.total() > 100


def _is_not_fenced(_: Any) -> Any:
    def mutant(self: ArchiveWriter, found: Any) -> None:
        self.newest = None
        self._archive = None
        raise StreamBusy(self.source.path, "busy: another writer is there")

    return mutant


def _believes(create: Any) -> Any:
    def mutant(self: Store, name: str, data: bytes) -> bool:
        try:
            return bool(create(self, name, data))
        except store.exceptions.GenericError:
            return True

    return mutant


MUTANTS = [
    pytest.param(
        replaced(archived_file, "_durable", lambda page, visible: visible.entries),
        (faults.KILL, faults.PUSH),
        "os",
        id="what is visible is archived",
    ),
    pytest.param(
        changed(ArchiveWriter, "_fence", _is_not_fenced),
        (faults.PUSH, faults.SLEEP, faults.RESTORE),
        "commit",
        id="a fenced writer begins again",
    ),
    pytest.param(
        replaced(ArchiveWriter, "_continues", lambda *_: True),
        (faults.UPDATE, faults.TRUNCATE),
        "commit",
        id="the last page is not compared",
    ),
    pytest.param(
        replaced(writer, "_equal_parts", lambda archive, row, digests: iter([row])),
        (faults.UPDATE,),
        "commit",
        id="pages of a row are not compared",
    ),
    pytest.param(
        changed(Store, "_create", _believes),
        (faults.FLAKY,),
        "commit",
        id="a lost answer counts as success",
    ),
    pytest.param(
        replaced(follower, "in_common", lambda archive, newest, file: file.state().head.entries),
        (faults.UPDATE, faults.TRUNCATE),
        "commit",
        id="a follower does not compare",
    ),
    pytest.param(
        replaced(restore, "_held", lambda file, first, known: [b""] * len(known)),
        (faults.RESTORE, faults.CRASH, faults.KILL),
        "commit",
        id="a restore that goes on does not compare",
    ),
]


@pytest.mark.mutants
@pytest.mark.parametrize(("patch", "kinds", "sync"), MUTANTS)
def test_is_found(patch: Patch, kinds: Sequence[str], sync: Any) -> None:
    plans = [_plan(seed, kinds, sync) for seed in range(1, 9)]
    run(next(plan for plan in plans if _is_found(patch, plan)))


def _plan(seed: int, kinds: Sequence[str], sync: Any) -> Plan:
    chance = random.Random(seed)
    events = [
        Event(
            round(6 * chance.random(), 2), chance.choice(kinds), *chance.choices(range(1000), k=2)
        )
        for _ in range(14)
    ]
    return Plan(seed, tuple(events), relays=0, sync=sync, archives=True)


def _is_found(patch: Patch, plan: Plan) -> bool:
    with patch():
        try:
            run(plan)
        except Exception as error:  # noqa: BLE001
            print(f"{type(error).__name__}: {error}")
            return True
    return False
