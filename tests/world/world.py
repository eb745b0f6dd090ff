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
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import trio

from datastreamer.storage.write.durability import SyncPolicy
from tests.storage.lab.cuts import Cut
from tests.storage.lab.disk import Interruption
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
from tests.world.faults import ERRORS, Event, Plan
from tests.world.machines import Machine, Program
from tests.world.model import Model, Wrong
from tests.world.network import Network
from tests.world.servers import ORIGIN, Origin, RelayProgram, image_of
from tests.world.trace import Trace, logged

BOUND_SECONDS = 120.0
"""Within this time after the last fault everybody has everything."""

_LOOK_SECONDS = 0.5
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
    trace: tuple[str, ...] = ()


class World:
    """One plan, carried out."""

    def __init__(self, plan: Plan, chance: random.Random, sim_time: SimTime) -> None:
        self.plan = plan
        self.chance = chance
        self.time = sim_time
        self.trace = Trace(sim_time.monotonic)
        self.model = Model(durable=plan.sync == "commit")
        self.machines: dict[str, Machine] = {}
        self.relays: dict[str, RelayProgram] = {}
        self.publishers: list[PublisherProgram] = []
        self.clients: list[ClientProgram] = []
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
                drivers = Drivers(self.network)
                stack.enter_context(drivers.replaced(self.time))
                stack.enter_context(logged(self.trace, name_here))
                self._build(drivers, token_file)
                nursery.start_soon(self._watch)
                await trio.sleep(_START_SECONDS)
                async with trio.open_nursery() as self._faults:
                    for event in self.plan.events:
                        await trio.sleep(event.after)
                        self.trace.note("event", event)
                        _ACTIONS[event.what](self, event)
                await self._settle()
                nursery.cancel_scope.cancel()

    def _build(self, drivers: Drivers, token_file: str) -> None:
        plan, model = self.plan, self.model
        around = Surroundings(model, drivers, self.chance, self.trace, self.image)
        self.origin = Origin(model, plan.sync, token_file)
        self._machine(ORIGIN, self.origin.run)
        names = [ORIGIN]
        for number in range(plan.relays):
            # A chain; each has the origin to fall back on.
            upstreams = tuple(dict.fromkeys([names[-1], ORIGIN]))
            name = f"relay{number}"
            self.relays[name] = RelayProgram(upstreams, plan.relay_sync)
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
            client = ClientProgram(
                around, f"client{number}", kind, style, names[-1 - number % len(names)]
            )
            self.clients.append(client)
            self._machine(client.name, client.run)

    def _machine(self, name: str, main: Callable[[Program], Any]) -> None:
        machine = Machine(name, self.network, self.chance, main)
        self.machines[name] = machine

        async def run() -> None:
            name_here.set(name)
            await machine.run()

        self._nursery.start_soon(run)

    def image(self) -> Image:
        return image_of(self.machines[ORIGIN])

    # What happens.

    def _pick(self, event: Event) -> Machine:
        machines = list(self.machines.values())
        return machines[event.pick % len(machines)]

    def _servers(self) -> list[Machine]:
        return [self.machines[name] for name in (ORIGIN, *self.relays)]

    def _server(self, event: Event) -> Machine:
        servers = self._servers()
        return servers[event.pick % len(servers)]

    def lose(self, event: Event) -> None:
        self.network.lose(event.pick)

    def partition(self, event: Event) -> None:
        self._cut(event, both=True)

    def one_way(self, event: Event) -> None:
        self._cut(event, both=False)

    def _cut(self, event: Event, *, both: bool) -> None:
        one, other = self._pick(event).name, self._servers()[event.more % len(self._servers())].name
        if one == other:
            return
        if event.more % 2:
            one, other = other, one
        self.network.cut(one, other, both=both)
        self._later(event.seconds, lambda: self.network.join(one, other))

    def slow(self, event: Event) -> None:
        name = self._pick(event).name
        self.network.slow(name, 0.02 * (1 + event.more % 50))
        self._later(event.seconds, lambda: self.network.slow(name, 0.0))

    def kill(self, event: Event) -> None:
        self._in_background(self._pick(event).kill, event.seconds)

    def power(self, event: Event) -> None:
        machine = self._pick(event)
        self._may_lose(machine)
        self._in_background(machine.cut_power, Cut(event.mode, event.more), event.seconds)

    def crash(self, event: Event) -> None:
        torn = (0.0, 0.5, 1.0)[event.more % 3]
        self._interrupt(event, Interruption(event.more % 7, torn=torn))

    def refuse(self, event: Event) -> None:
        # Where entries are visible before they are on disk, what the system then forgets of them
        # is served: their pages are not whole, and no checksum covers them.
        visible_first = self._sync_of(self._server(event)) != "commit"
        evicts = Cut(event.mode, event.more) if event.more % 3 == 0 and not visible_first else None
        only = "sync" if event.more % 2 else ""
        error = ERRORS[event.more % len(ERRORS)]
        self._interrupt(event, Interruption(event.more % 5, error, only=only, evicts=evicts))

    def full(self, event: Event) -> None:
        """Nothing can be written for some time."""
        coming = Interruption(event.more % 5, ERRORS[1], lasting=True)
        machine = self._interrupt(event, coming)

        def free() -> None:
            if machine.program is not None and machine.program.disk.interruption is coming:
                machine.program.disk.interruption = None

        self._later(event.seconds, free)

    def _interrupt(self, event: Event, coming: Interruption) -> Machine:
        machine = self._server(event)
        if machine.program is not None:
            machine.program.disk.interruption = coming
        if coming.error is not None:
            self._may_lose(machine)
        return machine

    def _may_lose(self, machine: Machine) -> None:
        """What its clients have received may not be on its disk."""
        if self._sync_of(machine) != "commit":
            self.model.rewritten = True

    def _sync_of(self, machine: Machine) -> SyncPolicy:
        return self.plan.sync if machine.name == ORIGIN else self.plan.relay_sync

    def stop(self, event: Event) -> None:
        machine = self._server(event)

        async def stop() -> None:
            program = machine.program
            relay = self.relays.get(machine.name)
            running = self.origin.server if relay is None else relay.relay
            if program is None or running is None:
                return
            program.stop_listening()
            await running.finish(event.seconds)

        self._in_program(machine, stop)

    def _in_program(self, machine: Machine, call: Callable[[], Any]) -> None:
        if machine.program is not None:
            machine.program.call(call)

    def truncate(self, event: Event) -> None:
        """The publishers rest meanwhile: their leases forbid it."""
        share = 1 - (event.pick % 100 / 100) ** 2
        self._operate(lambda: self.origin.truncate(self.machines[ORIGIN], share))

    def update(self, event: Event) -> None:
        at = event.pick
        self._operate(lambda: self.origin.update(self.machines[ORIGIN], at))

    def _operate(self, change: Callable[[], bool]) -> None:
        async def operate() -> None:
            for publisher in self.publishers:
                publisher.resting = True
            for _ in range(30):
                machine = self.machines[ORIGIN]
                changed: list[bool] = []
                done = trio.Event()

                async def call() -> None:
                    try:
                        await trio.lowlevel.checkpoint()
                        changed.append(change())
                    finally:
                        done.set()

                self._in_program(machine, call)
                with trio.move_on_after(_LOOK_SECONDS):
                    await done.wait()
                if changed and changed[0]:
                    break
                await trio.sleep(_LOOK_SECONDS)
            for publisher in self.publishers:
                publisher.resting = False

        self._in_background(operate)

    def take_over(self, event: Event) -> None:
        chosen = self.publishers[event.pick % len(self.publishers)]
        chosen.active = True
        chosen.takes_over = bool(event.more % 4)

    def rest(self, event: Event) -> None:
        """Nothing."""

    def _later(self, seconds: float, call: Callable[[], object]) -> None:
        async def later() -> None:
            await trio.sleep(seconds)
            call()

        self._in_background(later)

    def _in_background(self, call: Callable[..., Any], *arguments: Any) -> None:
        self._faults.start_soon(call, *arguments)

    # What holds at any time.

    async def _watch(self) -> None:
        """No relay shows a part of an operation."""
        while True:
            await trio.sleep(_LOOK_SECONDS)
            for name, program in self.relays.items():
                relay = program.relay
                if relay is None or relay.stream is None:
                    continue
                total = relay.stream.total_entries
                if total not in self.model.ends:
                    self.model.look(self.image())
                if total not in self.model.ends:
                    raise Wrong(f"{name} shows {total} entries, in the middle of an operation")

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
        if not any(publisher.active for publisher in self.publishers):
            self.publishers[0].active = True
        await trio.sleep(_PUBLISH_SECONDS)
        for publisher in self.publishers:
            publisher.resting = True
        with trio.move_on_after(BOUND_SECONDS) as bound:
            while (lacking := self._lacking()) is not None:
                await trio.sleep(_LOOK_SECONDS)
        if bound.cancelled_caught:
            raise Wrong(f"{BOUND_SECONDS:g} s after the last fault: {lacking}")
        self._check()

    def _lacking(self) -> str | None:
        """Who has not everything yet, and why."""
        if self.origin.stream is None:
            return "the origin does not serve"
        if any(publisher.publishing for publisher in self.publishers):
            return "a publisher waits for a receipt"
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
            if not self.model.is_complete(client.seen):
                return f"{client.name} at {client.server} has {client.seen.next} of {total} entries"
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


_ACTIONS: dict[str, Callable[[World, Event], None]] = {
    faults.LOSE: World.lose,
    faults.PARTITION: World.partition,
    faults.ONE_WAY: World.one_way,
    faults.SLOW: World.slow,
    faults.KILL: World.kill,
    faults.POWER: World.power,
    faults.CRASH: World.crash,
    faults.REFUSE: World.refuse,
    faults.FULL: World.full,
    faults.STOP: World.stop,
    faults.TRUNCATE: World.truncate,
    faults.UPDATE: World.update,
    faults.TAKE_OVER: World.take_over,
    faults.REST: World.rest,
}


def run(plan: Plan, *, trace: bool = False) -> Outcome:
    """Carry out a plan. Raises `Wrong`, and what should not be raised in any program."""
    began = time.process_time()
    chance = random.Random(plan.seed)
    worlds: list[World] = []
    seconds = 0.0

    async def main(sim_time: SimTime) -> None:
        nonlocal seconds
        worlds.append(World(plan, chance, sim_time))
        start = trio.current_time()
        try:
            await worlds[0].run()
        finally:
            seconds = trio.current_time() - start

    try:
        clock.run(main, chance)
    except BaseException as error:
        if trace:
            print("\n".join(worlds[0].trace.lines))
        print(f"run({plan!r})")
        raise first_failure(error) from None
    finally:
        gc.collect()
    world = worlds[0]
    return Outcome(
        world.trace.digest(),
        world.trace.events,
        seconds,
        time.process_time() - began,
        len(world.model.history),
        len(world.model.acknowledged),
        sum(client.seen.rollbacks for client in world.clients),
        tuple(world.trace.lines),
    )


def first_failure(error: BaseException) -> BaseException:
    """The first error in a group that is not just a cancellation."""
    while inner := getattr(error, "exceptions", ()):
        error = next((each for each in inner if not isinstance(each, trio.Cancelled)), inner[0])
    return error
