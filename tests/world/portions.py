"""A world of portions: several producers, and consumers of portions beside consumers of all.

Each producer writes a stream of its own and serves it: the first one's is copied by a relay, the
second one's server is of before selections, the third one's uses TLS. Consumers come in pairs with
the same subscription: servers select for one of them, and send everything to the other. While
connections are lost, programs restart and streams are truncated, each payload that is delivered is
compared with what was published. In the end all are there, each once, and what was reported and
where the sources were read to are the same in all consumers.
"""

from __future__ import annotations

import contextlib
import itertools
import random
import sqlite3
import tempfile
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import trio

from datastreamer import SqliteStore, reassemble
from datastreamer.client.upstream import Upstream
from datastreamer.consumer.state import SourceFailed, SourceRolledBack
from datastreamer.format import FEATURE_SELECTIONS
from datastreamer.protocol.messages import Capabilities
from datastreamer.reassembly import Conflict, Dropped, Malformed, PayloadComplete
from datastreamer.relay.relay import Relay
from datastreamer.server.answers import batch_reads
from datastreamer.server.server import Server
from datastreamer.storage.stream import DataStream
from datastreamer.storage.write.sync_policy import SyncPolicy
from datastreamer.transport.tls import ServerTLS
from tests.network.secure import Authority
from tests.storage.made import BOOKMARK, Item
from tests.world.clock import SimTime
from tests.world.drivers import Drivers, name_here
from tests.world.faults import Event, Plan
from tests.world.happenings import LOOK_SECONDS, Happenings
from tests.world.machines import Machine, Program
from tests.world.model import Wrong
from tests.world.network import Network
from tests.world.script import Script
from tests.world.servers import BACKOFF, LIMITS, RelayProgram, closed, opened, serve_by
from tests.world.trace import Trace, logged
from tests.world.world import Outcome, carried_out

FIRST, OLD, SECURE = PRODUCERS = ("first", "old", "secure")
RELAY = "relay"
SUBSCRIPTIONS = ([b"\x01"], [b"\x02\x07", b"\x30"])

# Within this time after the last fault all consumers have everything.
_BOUND_SECONDS = 120.0
# What is not complete after this time is given up.
_MAX_AGE = 240.0
# Between saves that no payload causes, twice.
_SAVED_SECONDS = 25.0
_PAYLOADS_SECONDS = 12.0
# The entries of an operation, and those that a truncation removes: fewer than a client remembers.
_OPERATION = 30
_MOST_REMOVED = 60


@dataclass
class Producer:
    """A producer and the server of its stream, in one program."""

    name: str
    script: Script
    sync: SyncPolicy
    tls: ServerTLS | None
    due: deque[Item] = field(default_factory=deque)
    stream: DataStream | None = None
    server: Server | None = None
    scanned: int = 0
    """Bytes that servers examined for selections."""
    # The entries of the stream, where operations end, and how many of `due` are being committed.
    _log: list[Item] = field(default_factory=list)
    _ends: list[int] = field(default_factory=lambda: [0])
    _underway: int = 0

    async def run(self, program: Program) -> None:
        stream = await opened(program, self.sync)
        try:
            if stream.total_entries > len(self._log):
                self._committed()
            self._keep(stream.total_entries)
            self.server = Server(stream, limits=LIMITS)
            self.stream = stream
            async with trio.open_nursery() as nursery:

                async def serve(task_status: trio.TaskStatus[Any]) -> None:
                    assert self.server is not None
                    await self.server.run([], task_status)
                    nursery.cancel_scope.cancel()

                await nursery.start(serve)
                program.listen(serve_by(program, lambda: self.server, self.tls))
                await self._produce(stream)
        finally:
            if self.server is not None:
                self.scanned += self.server.counts.filter_scanned
            self.stream = self.server = None
            closed(program, stream)

    async def _produce(self, stream: DataStream) -> None:
        while True:
            await trio.sleep(self.script.chance.random())
            items = list(itertools.islice(self.due, self.script.chance.randint(1, _OPERATION)))
            if not items:
                continue
            self._underway = len(items)
            with stream.atomic_op() as op:
                for kind, data in items:
                    if kind == BOOKMARK:
                        op.add_bookmark(data)
                    else:
                        op.add_entry(kind, data)
            self._committed()

    def _committed(self) -> None:
        self._log += [self.due.popleft() for _ in range(self._underway)]
        self._ends.append(len(self._log))
        self._underway = 0

    def _keep(self, total: int) -> None:
        """The stream has the first `total` entries; the others are published again."""
        self.due.extendleft(reversed(self.script.again(self._log[total:])))
        del self._log[total:]
        assert len(self._log) == total
        self._ends = [end for end in self._ends if end <= total]
        self._underway = 0

    def truncate(self, pick: int) -> None:
        least = len(self._log) - _MOST_REMOVED
        ends = [end for end in self._ends[:-1] if end >= least]
        if self.stream is not None and ends:
            keep = ends[pick % len(ends)]
            self.stream.truncate(keep)
            self._keep(keep)


@dataclass
class Consumer:
    """A consumer, whose results and progress are in one database."""

    name: str
    script: Script
    trace: Trace
    subscribe: list[bytes] | None
    upstreams: dict[str, Upstream]
    selects: bool
    """Whether servers that can are asked to send only what is subscribed to."""
    events: dict[type, set[bytes]] = field(default_factory=dict)
    """The payloads and keys that were reported."""
    rolled_back: int = 0

    def __post_init__(self) -> None:
        self._database = sqlite3.connect(":memory:", check_same_thread=False)
        self._database.execute("CREATE TABLE result (id BLOB)")
        self._database.commit()

    @property
    def prefixes(self) -> list[bytes]:
        return [b""] if self.subscribe is None else self.subscribe

    async def run(self, program: Program) -> None:
        try:
            async with reassemble(
                self.upstreams,
                subscribe=self.subscribe,
                store=SqliteStore(self._database),
                on_event=self._note,
                batch_reads=self.selects,
                max_age=_MAX_AGE,
                timeout=4.0,
                heartbeat=4.0,
                backoff=BACKOFF,
                follow=True,
            ) as payloads:
                async for payload in payloads:
                    assert isinstance(payload, PayloadComplete)
                    self._take(payload)
        finally:
            # What was not saved is lost.
            self._database.rollback()

    def _take(self, payload: PayloadComplete) -> None:
        self.trace.note("payload", self.name, payload.id[:4].hex())
        if payload.id in self.found():
            raise Wrong(f"{self.name} is given payload {payload.id.hex()} twice")
        if payload.parts != self.script.parts(payload.id, self.prefixes):
            raise Wrong(f"{self.name} is given other parts of payload {payload.id.hex()}")
        self._database.execute("INSERT INTO result VALUES (?)", (payload.id,))

    def found(self) -> set[bytes]:
        return {own for (own,) in self._database.execute("SELECT id FROM result")}

    def _note(self, event: object) -> None:
        self.trace.note("reported", self.name, f"{event!s:.200}")
        match event:
            case Conflict() | Malformed():
                self.events.setdefault(type(event), set()).add(event.key)
            case Dropped():
                own = event.payload or self.script.owners[event.prefix or b""]
                if own not in self.script.endless(self.prefixes):
                    raise Wrong(f"{self.name} gives up {event}")
                self.events.setdefault(Dropped, set()).add(own)
            case SourceRolledBack():
                self.rolled_back += 1
            case SourceFailed(again=False):
                raise Wrong(f"{self.name} does not read {event.source} any more: {event.error}")

    def lacks(self) -> int:
        """How many payloads it has not been given yet."""
        return len(self.script.whole(self.prefixes) - self.found())

    def check(self, totals: dict[str, int], *, restarted: bool) -> None:
        """Everything was given and reported, and positions are at the ends."""
        extra = self.found() - self.script.whole(self.prefixes)
        if self.lacks() or extra:
            raise Wrong(f"{self.name} lacks {self.lacks()} payloads, and has {len(extra)} more")
        prefixes = tuple(self.prefixes)
        for kind, keys in ((Conflict, self.script.lies), (Malformed, self.script.malformed)):
            wanted, told = self._matching(keys), self._matching(self.events.get(kind, set()))
            # A later run knows no values of what an earlier one has delivered.
            if told - wanted or (not restarted and wanted - told):
                raise Wrong(f"{self.name} reports {kind.__name__} of {told ^ wanted}")
            others = {key for key in self.events.get(kind, set()) if not key.startswith(prefixes)}
            if others and (kind is Conflict or others - keys):
                raise Wrong(f"{self.name} reports {kind.__name__} of {others}")
        endless = self.script.endless(self.prefixes)
        if self.events.get(Dropped, set()) != endless:
            raise Wrong(f"{self.name} gave up {self.events.get(Dropped)} of {endless}")
        progress = SqliteStore(self._database).load()
        assert progress is not None
        for name, place in progress.places.items():
            at = place.position, place.seen, place.read.next_entry
            if {*at} != {totals[name]}:
                raise Wrong(f"{self.name} is at {at} of {totals[name]} entries of {name}")

    def _matching(self, keys: set[bytes]) -> set[bytes]:
        prefixes = tuple(self.prefixes)
        return {key for key in keys if key.startswith(prefixes)}


class PortionWorld(Happenings):
    """One plan of portions, carried out."""

    def __init__(self, plan: Plan, chance: random.Random, sim_time: SimTime) -> None:
        self.plan = plan
        self.chance = chance
        self.time = sim_time
        self.trace = Trace(sim_time.monotonic)
        self.machines: dict[str, Machine] = {}
        self.script = Script(chance, PRODUCERS)
        self.relays: dict[str, RelayProgram] = {}
        self.producers: dict[str, Producer] = {}
        self.consumers: list[Consumer] = []
        self.settled = False
        self._publishing = True
        self._nursery: trio.Nursery

    async def run(self) -> None:
        with contextlib.ExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            async with trio.open_nursery() as self._nursery:
                self.network = Network(self._nursery, self.chance, self.trace)
                stack.enter_context(Drivers(self.network).replaced(self.time))
                stack.enter_context(logged(self.trace, name_here))
                stack.enter_context(mock.patch.object(batch_reads, "Capabilities", _capabilities))
                self._build(Authority(folder, "authority"))
                self._nursery.start_soon(self._publish)
                async with trio.open_nursery() as self._faults:
                    for event in self.plan.events:
                        await trio.sleep(event.after)
                        self.happen(event)
                await self._settle()
                self.settled = True
                self._nursery.cancel_scope.cancel()

    def _build(self, authority: Authority) -> None:
        for name in PRODUCERS:
            tls = ServerTLS(authority.issue(name, name)) if name == SECURE else None
            self.producers[name] = Producer(name, self.script, self.plan.sync, tls)
            self._machine(name, self.producers[name].run)
        self.relays[RELAY] = RelayProgram((FIRST,), self.plan.relay_sync, LIMITS)
        self._machine(RELAY, self.relays[RELAY].run)
        servers = {name: Upstream(name, 6900) for name in (FIRST, OLD, RELAY)}
        servers[SECURE] = Upstream(SECURE, 6900, authority.context())
        for number, subscribe in enumerate(SUBSCRIPTIONS):
            for selects in (True, False):
                names = (RELAY if number else FIRST, OLD, SECURE)
                name = f"{'portion' if selects else 'full'}{number}"
                self._consumer(name, subscribe, {each: servers[each] for each in names}, selects)
        self._consumer("all", None, {each: servers[each] for each in (RELAY, OLD, SECURE)}, True)

    def _consumer(
        self, name: str, subscribe: list[bytes] | None, servers: dict[str, Upstream], selects: bool
    ) -> None:
        made = Consumer(name, self.script, self.trace, subscribe, servers, selects)
        self.consumers.append(made)
        self._machine(name, made.run)

    async def _publish(self) -> None:
        while self._publishing:
            for name, items in self.script.next().items():
                self.producers[name].due.extend(items)
            await trio.sleep(_PAYLOADS_SECONDS)

    # What happens.

    def _servers(self) -> list[Machine]:
        return [self.machines[name] for name in (*PRODUCERS, RELAY)]

    def _is_steady(self, machine: Machine) -> bool:
        """Consumers that are never restarted report every conflict."""
        return machine.name.endswith("0")

    def kill(self, event: Event) -> None:
        if not self._is_steady(self._pick(event)):
            super().kill(event)

    def power(self, event: Event) -> None:
        if not self._is_steady(self._pick(event)):
            super().power(event)

    def _may_lose(self, machine: Machine) -> None:
        """Everything is published again."""

    def _running(self, machine: Machine) -> Relay | Server | None:
        relay = self.relays.get(machine.name)
        return self.producers[machine.name].server if relay is None else relay.relay

    def truncate(self, event: Event) -> None:
        name = PRODUCERS[event.pick % len(PRODUCERS)]

        async def truncate() -> None:
            await trio.lowlevel.checkpoint()
            self.producers[name].truncate(event.more)

        self._in_program(self.machines[name], truncate)

    # The end.

    async def _settle(self) -> None:
        self.trace.note("faults are over")
        self.network.heal()
        for machine in self._servers():
            if machine.program is not None:
                machine.program.disk.interruption = None
        self._publishing = False
        await trio.sleep(_PAYLOADS_SECONDS)
        for name, items in self.script.last().items():
            self.producers[name].due.extend(items)
        lacking: Sequence[str] = ()
        with trio.move_on_after(_BOUND_SECONDS) as bound:
            while lacking := self._lacking():
                await trio.sleep(LOOK_SECONDS)
        if bound.cancelled_caught:
            raise Wrong(f"{_BOUND_SECONDS:g} s after the last fault: {lacking}")
        await trio.sleep(_MAX_AGE + 2)
        # Something new: what was given up in silence is saved with it.
        for producer in self.producers.values():
            producer.due.append((BOOKMARK, b"the end"))
        await trio.sleep(_SAVED_SECONDS)
        totals = {name: self.producers[name].stream.total_entries for name in PRODUCERS}
        totals[RELAY] = totals[FIRST]
        for consumer in self.consumers:
            restarted = not self._is_steady(self.machines[consumer.name])
            consumer.check(totals, restarted=restarted)
        scanned = {
            name: each.scanned + each.server.counts.filter_scanned
            for name, each in self.producers.items()
        }
        if scanned[OLD] or not (scanned[FIRST] and scanned[SECURE]):
            raise Wrong(f"servers have examined {scanned} bytes for selections")

    def _lacking(self) -> list[str]:
        """Who has not everything yet."""
        found = [
            f"{each.name} has {len(each.due)} entries to publish"
            for each in self.producers.values()
            if each.due or each.stream is None
        ]
        return found + [
            f"{consumer.name} lacks {lacks} payloads"
            for consumer in self.consumers
            if (lacks := consumer.lacks())
        ]


def _capabilities(features: int = Capabilities().features, **others: Any) -> Capabilities:
    old = name_here.get() == OLD
    return Capabilities(features & ~(FEATURE_SELECTIONS * old), **others)


def run(plan: Plan, *, trace_file: str | None = None) -> Outcome:
    """Carry out a plan, as `world.run`; operations acknowledged are payloads."""
    began = time.process_time()
    world, seconds = carried_out(PortionWorld, plan, trace_file)
    streams = sum(len(each._log) for each in world.producers.values())
    return Outcome(
        world.trace.digest(),
        world.trace.events,
        seconds,
        time.process_time() - began,
        streams,
        len(world.script.payloads),
        sum(consumer.rolled_back for consumer in world.consumers),
    )
