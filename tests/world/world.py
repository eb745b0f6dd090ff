"""A world: a server that publishers write to, relays of it, and clients, under faults.

Everything runs in one process and in simulated time; a plan decides all of it, so that a run can be
repeated. While it runs, the model checks what is acknowledged and what is received. After the last
event all faults end, the publishers stop, and everybody has `BOUND_SECONDS` to catch up.
"""

from __future__ import annotations

import contextlib
import gc
import os
import random
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeVar

import trio

from datastreamer.errors import DatastreamerError
from datastreamer.storage.stream import DataStream
from tests.storage.lab.image import Image
from tests.storage.lab.model import plain
from tests.world import clock, faults
from tests.world.actors import (
    KINDS,
    STYLES,
    TOKEN,
    ClientProgram,
    PublisherProgram,
    Surroundings,
)
from tests.world.clock import SimTime
from tests.world.drivers import Drivers, name_here
from tests.world.faults import Plan
from tests.world.follower_answers import NAME
from tests.world.followers import FollowerProgram
from tests.world.happenings import LOOK_SECONDS, Happenings
from tests.world.machines import Machine, Program
from tests.world.model import Model, Wrong
from tests.world.network import Network
from tests.world.rot import Flip, Rot
from tests.world.servers import (
    LIMITS,
    ORIGIN,
    PATH,
    SCRUBBING,
    Origin,
    RelayProgram,
    image_of,
)
from tests.world.trace import Trace, logged

BOUND_SECONDS = 120.0
"""Within this time after the last fault everybody has everything."""

NEWS_SECONDS = 1.0
"""Within this time everybody has what was published, if nothing fails."""

# At how many of the looks an operator sees the metric.
_RESTORED_SHARE = 0.1
_START_SECONDS = 3.0
_PUBLISH_SECONDS = 5.0


@dataclass(frozen=True)
class Outcome:
    """What came of a plan."""

    digest: str
    events: int
    simulated_seconds: float
    cpu_seconds: float
    entries: int
    acknowledged: int
    rollbacks: int
    flipped: int = 0
    """Bits that were changed on disks."""
    damage: int = 0
    """How often a program logged a damaged page, or that it has restored one."""
    healed: int = 0
    """Changed bits that were restored."""
    replaced: int = 0
    """How often a relay has put updated entries in the place of those of a damaged page."""
    injected: Counter[str] = field(default_factory=Counter)
    """Requests to a bucket that failed, by operation and kind."""
    counts: Counter[str] = field(default_factory=Counter)
    """What was done in a world that evicts."""

    @property
    def cpu_per_hour(self) -> float:
        """Seconds of CPU for an hour of simulated time."""
        return 3600 * self.cpu_seconds / self.simulated_seconds


class World(Happenings):
    """One plan, carried out."""

    def __init__(self, plan: Plan, chance: random.Random, sim_time: SimTime) -> None:
        self.plan = plan
        self.chance = chance
        self.time = sim_time
        self.trace = Trace(sim_time.monotonic)
        self.model = Model(durable=plan.sync == "commit")
        self.model.refuses = not {event.what for event in plan.events} <= faults.QUIET
        self.machines: dict[str, Machine] = {}
        self.relays: dict[str, RelayProgram] = {}
        self.publishers: list[PublisherProgram] = []
        self.clients: list[ClientProgram | FollowerProgram] = []
        self.rot = Rot(PATH, self.stream_of)
        self._settling = False
        self.settled = False
        """Whether it came to its end."""
        self.network: Network
        self.origin: Origin
        self._faults: trio.Nursery
        self._nursery: trio.Nursery

    async def run(self) -> None:
        with contextlib.ExitStack() as stack:
            folder = stack.enter_context(tempfile.TemporaryDirectory())
            token_file = os.path.join(folder, "tokens")
            with open(os.open(token_file, os.O_CREAT | os.O_WRONLY, 0o600), "w") as file:
                file.write(TOKEN)
            async with trio.open_nursery() as nursery:
                self._nursery = nursery
                self.network = Network(nursery, self.chance, self.trace)
                stack.enter_context(Drivers(self.network).replaced(self.time))
                stack.enter_context(logged(self.trace, name_here))
                self._build(token_file)
                nursery.start_soon(self._watch)
                await trio.sleep(_START_SECONDS)
                async with trio.open_nursery() as self._faults:
                    for event in self.plan.events:
                        await trio.sleep(event.after)
                        self.happen(event)
                await self._settle()
                self.settled = True
                nursery.cancel_scope.cancel()

    def _build(self, token_file: str) -> None:
        plan, model = self.plan, self.model
        around = Surroundings(model, self.chance, self.trace, self.image)
        limits = SCRUBBING if plan.rots else LIMITS
        self.origin = Origin(model, plan.sync, token_file, self.image, limits)
        self._machine(ORIGIN, self.origin.run)
        names = [ORIGIN]
        for number in range(plan.relays):
            # A chain; each has the origin to fall back on.
            upstreams = tuple(dict.fromkeys([names[-1], ORIGIN]))
            name = f"relay{number}"
            self.relays[name] = RelayProgram(upstreams, plan.relay_sync, limits)
            self._machine(name, self.relays[name].run)
            names.append(name)
        for number in range(2):
            kind = ("trio", "asyncio")[(plan.seed + number) % 2]
            publisher = PublisherProgram(
                around, f"publisher{number}", kind, plan.largest, active=number == 0
            )
            self.publishers.append(publisher)
            self._machine(publisher.name, publisher.run)
        for number in range(plan.clients):
            kind = KINDS[(plan.seed + number) % len(KINDS)]
            style = STYLES[(plan.seed // 3 + number) % len(STYLES)]
            # Its own one is the first of them.
            own = len(names) - 1 - number % len(names)
            servers = (*names[own:], *names[:own]) if plan.several else (names[own],)
            client = ClientProgram(around, f"client{number}", kind, style, servers)
            self.clients.append(client)
            self._machine(client.name, client.run)
        for number in range(plan.followers):
            at = number % len(names)
            durable = plan.sync == plan.relay_sync == "commit"
            name = f"{NAME}{number}"
            follower = FollowerProgram(around, self.network, name, (names[at],), durable)
            self.clients.append(follower)
            self._machine(follower.name, follower.run)

    def _machine(self, name: str, main: Callable[[Program], Any]) -> Machine:
        machine = super()._machine(name, main)
        machine.on_start = lambda: self.rot.evict_changed(machine)
        return machine

    def image(self) -> Image:
        return self.rot.undone(ORIGIN, image_of(self.machines[ORIGIN]))

    def stream_of(self, name: str) -> DataStream | None:
        """The stream that a machine serves now."""
        if name == ORIGIN:
            return self.origin.stream
        relay = self.relays[name].relay
        return None if relay is None or relay.server is None else relay.stream

    # What holds at any time.

    async def _watch(self) -> None:
        """No relay shows a part of an operation, and no damage is restored without a word."""
        while True:
            await trio.sleep(LOOK_SECONDS)
            self._watch_rot()
            for name, program in self.relays.items():
                relay = program.relay
                if relay is None or relay.stream is None:
                    continue
                total = relay.stream.total_entries
                if total not in self.model.ends:
                    self.model.look(self.image())
                if total not in self.model.ends and not _lacks_boundary(relay.stream, total):
                    raise Wrong(f"{name} shows {total} entries, in the middle of an operation")

    def _watch_rot(self) -> None:
        """Restored pages were named, and whole ones were not; an operator restores those of the
        origin: soon after its metric counts them, and at once when nothing else fails."""
        if named := self.rot.spared & self.trace.named:
            raise Wrong(f"a log names {named}, of which only bits behind the mark have changed")
        if not self.rot.flips:
            return
        for machine in self._servers():
            for flip in self.rot.forget_restored(machine):
                place = flip.name, flip.page
                if place not in self.trace.named and not self.model.truncations:
                    raise Wrong(f"{flip.name} has page {flip.page} again, and no log named it")
                self.trace.named.discard(place)
        if self._settling or self.chance.random() < _RESTORED_SHARE:
            for flip in self.rot.flips:
                if flip.name == ORIGIN:
                    self._in_program(self.machines[ORIGIN], partial(self._restore, flip))

    async def _restore(self, flip: Flip) -> None:
        """Restore a page of the origin that its metric counts, from whatever server has it. (Relays
        restore theirs.)"""
        await trio.lowlevel.checkpoint()
        server = self.origin.server
        damaged = () if server is None else server.broadcast.pages.damaged
        if flip in self.rot.flips and flip.page in [each.page for each in damaged]:
            names = [machine.name for machine in self._servers()]
            try:
                self.trace.note("restored", self.rot.heal(flip, names))
            except DatastreamerError as error:
                self.trace.note("not restored", error)

    # The end.

    async def _settle(self) -> None:
        self.trace.note("faults are over")
        self.network.heal()
        for machine in self._servers():
            program = machine.program
            if program is not None:
                program.disk.interruption = None
                if program.disk.refusals:
                    # What it may not be able to continue from, an operator gets over.
                    self._nursery.start_soon(machine.kill, 0.0)
        self._settling = True
        if not any(publisher.active for publisher in self.publishers):
            self.publishers[0].active = True
        await trio.sleep(_PUBLISH_SECONDS)
        for publisher in self.publishers:
            publisher.resting = True
        with trio.move_on_after(BOUND_SECONDS) as bound:
            while (lacking := self._lacking()) is not None:
                await trio.sleep(LOOK_SECONDS)
        if bound.cancelled_caught:
            raise Wrong(f"{BOUND_SECONDS:g} s after the last fault: {lacking}")
        self._check()
        await self._see_news()

    async def _see_news(self) -> None:
        """While nothing fails, an operation is with everybody at once."""
        publisher = next(each for each in self.publishers if each.active)
        publisher.resting = False
        with trio.move_on_after(BOUND_SECONDS) as bound:
            while not publisher.publishing:
                await trio.sleep(LOOK_SECONDS)
            await trio.sleep(_PUBLISH_SECONDS)
            publisher.resting = True
            # Until its last receipt.
            while publisher.publishing:
                await trio.sleep(LOOK_SECONDS)
        if bound.cancelled_caught:
            raise Wrong(f"{publisher.name} cannot publish, and nothing fails")
        await trio.sleep(NEWS_SECONDS)
        if (lacking := self._lacking(readers=False)) is not None:
            raise Wrong(f"{NEWS_SECONDS:g} s after the last receipt: {lacking}")

    def _lacking(self, *, readers: bool = True) -> str | None:
        """Who has not everything yet, and why; without `readers`, who of those that stream."""
        if self.origin.stream is None:
            return "the origin does not serve"
        if any(publisher.publishing for publisher in self.publishers):
            return "a publisher waits for a receipt"
        if self.rot.flips:
            return f"bits are changed: {self.rot.flips}"
        self.model.look_anew(self.image())
        total = len(self.model.history)
        if self.origin.stream.total_entries != total:
            return f"the origin shows {self.origin.stream.total_entries} of {total} entries"
        for name, program in self.relays.items():
            relay = program.relay
            if relay is None or relay.total_entries != total:
                return f"{name} has {relay and relay.total_entries} of {total} entries"
            if not relay.caught_up:
                return f"{name} is not caught up: {[s.lost for s in relay.download.states]}"
            if relay.download.uncompared:
                return f"{name} has {relay.download.uncompared} entries to compare"
        for client in self.clients:
            if client.style == "reads" and not readers:
                continue
            if not self.model.is_complete(client.seen):
                return (
                    f"{client.name} at {client.servers} has {client.seen.next} of {total} entries"
                )
        return None

    def _check(self) -> None:
        self.model.check_end()
        wanted = self.model.items()
        for machine in self._servers():
            found = plain(image_of(machine))
            if found != wanted:
                at = [n for n, (a, b) in enumerate(zip(found, wanted, strict=False)) if a != b]
                raise Wrong(f"{machine.name} differs from the origin at entries {at[:10]}")
        for client in self.clients:
            self.model.check_client(client.seen)


def _lacks_boundary(stream: DataStream, total: int) -> bool:
    """Whether a relay that has followed another history back to `total` entries had no bookmark to
    find the beginning of an operation by."""
    return stream.epoch > 0 and not any(each.bookmarks() for each in stream.batches(0, total))


def run(plan: Plan, *, trace_file: str | None = None) -> Outcome:
    """Carry out a plan; what happened is written to `trace_file`. Raises `Wrong`, and what should
    not be raised in any program; then it prints the command that does all this again."""
    began = time.process_time()
    world, seconds = carried_out(World, plan, trace_file)
    return Outcome(
        world.trace.digest(),
        world.trace.events,
        seconds,
        time.process_time() - began,
        len(world.model.history),
        len(world.model.acknowledged),
        sum(client.seen.rollbacks for client in world.clients),
        world.rot.flipped,
        world.trace.damage,
        world.rot.healed,
        world.trace.replaced,
    )


class Runs(Protocol):
    """A world, as far as it is carried out."""

    trace: Trace
    settled: bool

    async def run(self) -> None: ...


W = TypeVar("W", bound=Runs)


def carried_out(
    make: Callable[[Plan, random.Random, SimTime], W], plan: Plan, trace_file: str | None
) -> tuple[W, float]:
    """The world of a plan, at its end, and its seconds. Raises and prints as `run`."""
    chance = random.Random(plan.seed)
    worlds: list[W] = []
    seconds = 0.0

    async def main(sim_time: SimTime) -> None:
        nonlocal seconds
        worlds.append(make(plan, chance, sim_time))
        start = trio.current_time()
        try:
            await worlds[0].run()
        finally:
            seconds = trio.current_time() - start

    try:
        clock.run(main, chance)
        assert worlds[0].settled
    except BaseException as error:  # noqa: BLE001
        print(f"Replay, in the folder of the checkout: {plan.command}")
        raise first_failure(error) from None
    finally:
        gc.collect()
        if trace_file is not None:
            Path(trace_file).write_text("\n".join(worlds[0].trace.lines))
    return worlds[0], seconds


def first_failure(error: BaseException) -> BaseException:
    """The first error in a group that is not just a cancellation."""
    while inner := getattr(error, "exceptions", ()):
        error = next((each for each in inner if not isinstance(each, trio.Cancelled)), inner[0])
    return error
