"""What a power cut takes: choices that print as they were drawn, so that they can be replayed."""

from __future__ import annotations

import errno
import random
from collections.abc import Sequence
from dataclasses import dataclass

from hypothesis import strategies as st

from tests.storage.lab.disk import Interruption, Unsettled

_HEADER_SECTORS = 8

ARRIVED = "everything arrived"
MODES = (
    ARRIVED,
    "nothing arrived",
    "one is missing",
    "one arrived",
    "header only",
    "data only",
    "some of the header",
    "the first ones",
    "the last ones",
    "half of it",
    "any",
)


@dataclass(frozen=True)
class Cut:
    """A way to choose. `seed` says which one, how many, and so on."""

    mode: str
    seed: int = 0

    def __call__(self, things: Sequence[Unsettled]) -> list[int]:
        if not things:
            return []
        new = [thing.versions - 1 for thing in things]
        at = self.seed % len(things)
        chance = random.Random(self.seed)
        if self.mode == ARRIVED:
            return new
        if self.mode == "nothing arrived":
            return [0] * len(things)
        if self.mode == "one is missing":
            return [n if i != at else chance.randrange(n) for i, n in enumerate(new)]
        if self.mode == "one arrived":
            return [n if i == at else 0 for i, n in enumerate(new)]
        if self.mode == "the first ones":
            return [n if i <= at else 0 for i, n in enumerate(new)]
        if self.mode == "the last ones":
            return [n if i >= at else 0 for i, n in enumerate(new)]
        if self.mode in ("half of it", "any"):
            odds = 0.5 if self.mode == "half of it" else chance.random()
            return [chance.randint(0, n) if chance.random() < odds else n for n in new]
        picks = []
        for thing, n in zip(things, new, strict=True):
            if thing.what != "sector":
                picks.append(chance.randint(0, n))
            elif thing.at < _HEADER_SECTORS:
                arrived = self.mode == "header only"
                if self.mode == "some of the header":
                    arrived = bool(self.seed >> thing.at & 1)
                picks.append(n if arrived else 0)
            else:
                arrived = self.mode == "data only" or (
                    self.mode == "some of the header" and bool(self.seed & 256)
                )
                picks.append(n if arrived else 0)
        return picks


cuts = st.builds(Cut, st.sampled_from(MODES), st.integers(0, 2047))


@dataclass(frozen=True)
class Crash:
    """How a process ends: after `after` operations, by a kill or (`cut`) with the machine; or
    (`detached`) the machine runs on, and its file system loses what was not synced.

    `only` counts the operations of that name. `recovery` is how the next open ends.
    """

    after: int
    cut: Cut | None
    torn: float = 0.0
    only: str = ""
    early_reader: bool = False
    recovery: Crash | Fault | None = None
    detached: bool = False

    def interruption(self) -> Interruption:
        return Interruption(self.after, torn=self.torn, only=self.only)

    def takes_something(self) -> bool:
        """Whether what was not synced may be lost."""
        return self.cut is not None and self.cut.mode != ARRIVED


@dataclass(frozen=True)
class Fault:
    """What the disk refuses: its operation number `after`, and with `lasting` all behind it.

    `only` as in a `Crash`. With `evicts` the system forgets at once what a sync that failed
    did not bring to disk.
    """

    after: int
    error: int
    lasting: bool
    torn: float = 0.0
    only: str = ""
    evicts: Cut | None = None

    def interruption(self) -> Interruption:
        return Interruption(self.after, self.error, self.lasting, self.torn, self.only, self.evicts)


# Syncs above all: when one is on its way there is most to lose.
def _points(after: int) -> st.SearchStrategy[tuple[int, str]]:
    return st.one_of(
        st.sampled_from([(0, "sync"), (0, "sync"), (1, "sync")]),
        st.integers(0, after).map(lambda n: (n, "")),
    )


def _crashes(
    after: int, recovery: st.SearchStrategy[Crash | Fault | None]
) -> st.SearchStrategy[Crash]:
    return st.builds(
        lambda point, cut, torn, early, recovery, detached: Crash(
            point[0], cut, torn, point[1], early, recovery, detached
        ),
        _points(after),
        cut=st.one_of(cuts, cuts, cuts, st.none()),
        torn=st.sampled_from([0.0, 0.5, 1.0]),
        early=st.booleans(),
        recovery=recovery,
        detached=st.booleans(),
    )


faults = st.builds(
    lambda point, error, lasting, torn, evicts: Fault(
        point[0], error, lasting, torn, point[1], evicts
    ),
    _points(6),
    error=st.sampled_from([errno.ENOSPC, errno.EIO]),
    lasting=st.booleans(),
    torn=st.sampled_from([0.0, 0.5]),
    evicts=st.one_of(st.none(), cuts),
)
_again = _crashes(12, st.one_of(st.none(), faults))
_recoveries = st.one_of(st.none(), st.none(), _crashes(12, st.one_of(st.none(), _again)), faults)
crashes = _crashes(5, _recoveries)
Trouble = Crash | Fault | None
troubles: st.SearchStrategy[Trouble] = st.one_of(st.none(), crashes, crashes, faults)
# While a huge operation is written, part by part.
refusals = st.builds(
    Fault,
    st.integers(0, 3),
    error=st.sampled_from([errno.ENOSPC, errno.EIO]),
    lasting=st.booleans(),
    torn=st.sampled_from([0.0, 0.5]),
    only=st.just("place"),
)
