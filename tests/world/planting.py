"""How a fault is planted in the package, and the plans that are to find it.

A mutant names what happens in its plans: a plan without truncations finds nothing wrong with what a
truncation does.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

from tests.world.faults import Event, Plan

Patch = Callable[[], contextlib.AbstractContextManager[Any]]


@dataclass(frozen=True)
class Mutant:
    name: str
    patch: Patch
    kinds: tuple[str, ...]
    """What happens in its plans."""
    relays: int = 1
    largest: int = 60
    clients: int = 5
    pace: float = 3.0
    """Maximum number of seconds between two events."""
    seed: int = 0
    """Of a plan that finds it."""
    several: bool = False
    """Whether clients know all servers."""
    followers: int = 0

    def plan(self, seed: int) -> Plan:
        """A plan that may find it."""
        chance = random.Random(f"{self.kinds}{seed}")
        events = tuple(
            Event(
                round(chance.random() * self.pace, 2),
                chance.choice(self.kinds),
                chance.randrange(1000),
                chance.randrange(1000),
            )
            for _ in range(12)
        )
        return Plan(
            seed,
            events,
            self.relays,
            self.clients,
            largest=self.largest,
            several=self.several,
            followers=self.followers,
        )


def replaced(owner: object, name: str, value: Any) -> Patch:
    return lambda: mock.patch.object(owner, name, value)


def changed(owner: object, name: str, make: Callable[[Any], Any]) -> Patch:
    """`owner.name` is what `make` gives for the original."""
    return lambda: mock.patch.object(owner, name, make(getattr(owner, name)))


def together(*patches: Patch) -> Patch:
    @contextlib.contextmanager
    def patched() -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for patch in patches:
                stack.enter_context(patch())
            yield

    return patched


def nothing(*_: Any, **__: Any) -> None:
    """In place of a step."""
