"""What happens to a world: faults and operators' work, as values that print as they were drawn.

A plan says which machines there are and what happens, in which order and when. Hypothesis draws
plans and shrinks them; `plan_of` makes one of any length from a seed.
"""

from __future__ import annotations

import errno
import random
import shlex
from dataclasses import dataclass

from hypothesis import strategies as st

from datastreamer.storage.write.sync_policy import SyncPolicy
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
ROT = "change a bit of a page on a disk"
ROT_RELAY = "change a bit of a page on a relay's disk"
ROT_SERVED = "change a bit of a page on a disk while its server runs"
OUT = "the bucket is out"
CUT_OFF = "a machine does not reach the bucket"
FLAKY = "requests to the bucket fail"
SLEEP = "a machine sleeps within a request"
PUSH = "push a file within an operation of its disk"
RESTORE = "restore a machine's file from the bucket"
DECIDE = "take the archive over"
END_EVICTION = "end a machine's program, or its power, while pages are evicted or brought back"
IN_PLACE = "bring the evicted pages of a stopped machine back"
REST = "nothing"

KINDS = (
    *(LOSE, LOSE, PARTITION, ONE_WAY, SLOW, KILL, KILL, POWER, CRASH, REFUSE, FULL, STOP),
    *(TRUNCATE, UPDATE, UPDATE, TAKE_OVER, TAKE_OVER, REST),
)
ROTTING = (
    *(ROT, ROT_SERVED, ROT_SERVED, ROT_SERVED),
    *(LOSE, PARTITION, ONE_WAY, SLOW, KILL, KILL, STOP, TAKE_OVER, REST),
)
"""Where bits change, nothing else removes or changes what was written: a page without a checksum
has no protection."""
RELAYS_ROT = (
    *(ROT_RELAY, ROT_RELAY, ROT_RELAY, ROT_RELAY, UPDATE, UPDATE, UPDATE, TRUNCATE),
    *(LOSE, PARTITION, KILL, STOP, REST),
)
"""Where only relays' disks change bits, the upstream may have changed the page when the relay finds
that."""
PORTIONS = (
    *(LOSE, LOSE, LOSE, PARTITION, ONE_WAY, SLOW, KILL, KILL, KILL, POWER, CRASH, STOP),
    *(TRUNCATE, TRUNCATE, REST),
)
"""In a world of portions (`portions.py`)."""
ARCHIVES = (
    *(OUT, CUT_OFF, FLAKY, FLAKY, FLAKY, SLEEP, SLEEP, PUSH, PUSH, RESTORE, DECIDE),
    *(KILL, KILL, POWER, CRASH, TRUNCATE, UPDATE, UPDATE, REST),
)
"""In a world of archives (`archives.py`)."""
EVICTING = (
    *(OUT, CUT_OFF, FLAKY, FLAKY, SLEEP, PUSH, RESTORE, DECIDE, KILL, KILL, POWER, POWER, CRASH),
    *(TRUNCATE, TRUNCATE, UPDATE, END_EVICTION, END_EVICTION, END_EVICTION, IN_PLACE, REST),
)
"""In a world of archives whose files keep their newest pages only (`retention.py`)."""
QUIET = frozenset({LOSE, PARTITION, ONE_WAY, SLOW, KILL, REST})
"""What neither a disk nor an operator nor another publisher has a part in."""
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
    seconds: float = 0.0
    """With which `plan_of` made it; 0: it did not."""
    several: bool = False
    """Whether each client knows all servers."""
    followers: int = 0
    """Clients over HTTP."""
    portions: bool = False
    """Whether it is of a world of portions."""
    archives: bool = False
    """Whether it is of a world of archives."""
    evicts: bool = False
    """Whether their machines have a local retention."""

    @property
    def rots(self) -> bool:
        """Whether bits change."""
        return any(event.what in (ROT, ROT_RELAY, ROT_SERVED) for event in self.events)

    @property
    def command(self) -> str:
        """The command that carries it out again."""
        which = {"portions": self.portions, "archives": self.archives, "evicts": self.evicts}
        if self.seconds and self == plan_of(self.seed, self.seconds, **which):
            options = "".join(f" --{name}" for name, chosen in which.items() if chosen)
            what = f"--seed {self.seed} --seconds {self.seconds:g}{options}"
        else:
            what = f"--plan {shlex.quote(repr(self))}"
        return f"python -m tests.world {what}"


def plan_of(
    seed: int,
    seconds: float,
    *,
    portions: bool = False,
    archives: bool = False,
    evicts: bool = False,
) -> Plan:
    """A plan of about this many seconds."""
    chance = random.Random(seed)
    archives = archives or evicts
    rots = seed % 4 == 3 and not portions and not archives
    kinds = PORTIONS if portions else EVICTING if evicts else ARCHIVES if archives else KINDS
    if rots:
        kinds = ROTTING if seed % 8 == 3 else RELAYS_ROT
    events: list[Event] = []
    until = 0.0
    while until < seconds:
        after = round(chance.choice([0.05, 0.5, 3.0, 12.0, 30.0]) * chance.random(), 3)
        until += after
        event = Event(after, chance.choice(kinds), chance.randrange(1000), chance.randrange(1000))
        events.append(event)
    if portions or archives:
        return Plan(
            seed,
            tuple(events),
            sync=chance.choice(POLICIES if archives else POLICIES[:2]),
            relay_sync=chance.choice(POLICIES[:2]),
            relays=seed % 2 if archives else 1,
            seconds=seconds,
            portions=portions,
            archives=archives,
            evicts=evicts,
        )
    return Plan(
        seed,
        tuple(events),
        relays=chance.randrange(4) + rots,
        clients=chance.randint(2, 5),
        sync=chance.choice(POLICIES),
        relay_sync=chance.choice(POLICIES),
        largest=SIZES[-1] if rots else chance.choice(SIZES),
        seconds=seconds,
        followers=0 if rots else 2,
    )


def _plans(
    kinds: tuple[str, ...], seconds: list[float], sizes: tuple[int, ...], relays: int
) -> st.SearchStrategy[Plan]:
    number = st.integers(0, 999)
    event = st.builds(Event, st.sampled_from(seconds), st.sampled_from(kinds), number, number)
    return st.builds(
        Plan,
        st.integers(0, 1 << 32),
        st.lists(event, max_size=25).map(tuple),
        relays=st.integers(relays, 2),
        clients=st.integers(1, 4),
        sync=st.sampled_from(POLICIES),
        relay_sync=st.sampled_from(POLICIES),
        largest=st.sampled_from(sizes),
        followers=st.integers(0, 3 if not relays else 0),
    )


plans = _plans(KINDS, [0.0, 0.01, 0.3, 2.0, 10.0], SIZES, 0)
# A page is full after some half a minute.
rotting_plans = st.one_of(
    _plans(kinds, [0.01, 2.0, 10.0, 20.0], SIZES[-1:], 1) for kinds in (ROTTING, RELAYS_ROT)
)
