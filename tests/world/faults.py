"""What happens to a world: faults and operators' work, as values that print as they were drawn.

A plan says which machines there are and what happens, in which order and when. Hypothesis draws
plans and shrinks them; `plan_of` makes one of any length from a seed.
"""

from __future__ import annotations

import errno
import random
from dataclasses import dataclass

from hypothesis import strategies as st

from datastreamer.storage.write.durability import SyncPolicy
from tests.storage.lab.cuts import MODES

LOSE = "lose a connection"
PARTITION = "partition two machines"
ONE_WAY = "lose one direction between two machines"
SLOW = "slow down a machine's network"
KILL = "kill a program"
POWER = "cut a machine's power"
CRASH = "end a program within an operation of its disk"
REFUSE = "refuse an operation of a disk"
FULL = "fill a disk"
STOP = "shut a server down in order"
TRUNCATE = "truncate the stream"
UPDATE = "update an entry"
TAKE_OVER = "another publisher takes over"
REST = "nothing"

KINDS = (
    *(LOSE, LOSE, PARTITION, ONE_WAY, SLOW, KILL, KILL, POWER, CRASH, REFUSE, FULL, STOP),
    *(TRUNCATE, UPDATE, UPDATE, TAKE_OVER, TAKE_OVER, REST),
)
ERRORS = (errno.EIO, errno.ENOSPC)
POLICIES: tuple[SyncPolicy, ...] = ("commit", 20, "os")
SIZES = (60, 60, 3_000, 60_000)


@dataclass(frozen=True)
class Event:
    """`after` seconds after the event before it `what` happens; `pick` says where, `more` how."""

    after: float
    what: str
    pick: int = 0
    more: int = 0

    @property
    def seconds(self) -> float:
        """How long it lasts, where it lasts."""
        return 0.2 + self.more % 97 / 8

    @property
    def mode(self) -> str:
        """What of the disk a power cut takes."""
        return MODES[self.more % len(MODES)]


@dataclass(frozen=True)
class Plan:
    """A world: its machines, and what happens. `seed` decides all that is left to chance."""

    seed: int
    events: tuple[Event, ...] = ()
    relays: int = 1
    clients: int = 2
    sync: SyncPolicy = "commit"
    relay_sync: SyncPolicy = "commit"
    largest: int = 60
    """Of an entry's bytes."""


def plan_of(seed: int, seconds: float) -> Plan:
    """A plan of about this many seconds."""
    chance = random.Random(seed)
    events: list[Event] = []
    until = 0.0
    while until < seconds:
        after = round(chance.choice([0.05, 0.5, 3.0, 12.0, 30.0]) * chance.random(), 3)
        until += after
        event = Event(after, chance.choice(KINDS), chance.randrange(1000), chance.randrange(1000))
        events.append(event)
    return Plan(
        seed,
        tuple(events),
        relays=chance.randrange(4),
        clients=chance.randint(2, 5),
        sync=chance.choice(POLICIES),
        relay_sync=chance.choice(POLICIES),
        largest=chance.choice(SIZES),
    )


events = st.builds(
    Event,
    st.sampled_from([0.0, 0.01, 0.3, 2.0, 10.0]),
    st.sampled_from(KINDS),
    st.integers(0, 999),
    st.integers(0, 999),
)
plans = st.builds(
    Plan,
    st.integers(0, 1 << 32),
    st.lists(events, max_size=25).map(tuple),
    relays=st.integers(0, 2),
    clients=st.integers(1, 4),
    sync=st.sampled_from(POLICIES),
    relay_sync=st.sampled_from(POLICIES),
    largest=st.sampled_from(SIZES),
)
