"""What happens to a world: the events of a plan, carried out.

Owns which machine an event concerns, how long what it does lasts, and how the model learns that
something may be lost. Knows no driver, and not how a world begins and ends.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import trio

from datastreamer.relay.relay import Relay
from datastreamer.server.server import Server
from datastreamer.storage.write.sync_policy import SyncPolicy
from tests.storage.lab.cuts import Cut
from tests.storage.lab.disk import Interruption
from tests.world import faults
from tests.world.actors import PublisherProgram
from tests.world.drivers import name_here
from tests.world.faults import ERRORS, Event, Plan
from tests.world.machines import Machine, Program
from tests.world.model import Model
from tests.world.network import Network
from tests.world.rot import Flip, Rot
from tests.world.servers import ORIGIN, Origin, RelayProgram
from tests.world.trace import Trace

LOOK_SECONDS = 0.5
# A server remembers for a second, and until it looks again, that a page is in the page cache.
REMEMBERED_SECONDS = 2.0
# Clients may read a page again before a bit of it has changed.
_EVICTIONS = 5


class Happenings:
    """The machines of a world, and what can be done to them."""

    plan: Plan
    trace: Trace
    model: Model
    rot: Rot
    network: Network
    chance: random.Random
    origin: Origin
    machines: dict[str, Machine]
    relays: dict[str, RelayProgram]
    publishers: list[PublisherProgram]
    _faults: trio.Nursery
    _nursery: trio.Nursery

    def _machine(self, name: str, main: Callable[[Program], Any]) -> Machine:
        """A machine that runs this program from now on."""
        machine = self.machines[name] = Machine(name, self.network, self.chance, main)

        async def run() -> None:
            name_here.set(name)
            await machine.run()

        self._nursery.start_soon(run)
        return machine

    def happen(self, event: Event) -> None:
        """Carry out an event; what it does may end later."""
        self.trace.note("event", event)
        getattr(self, _ACTIONS[event.what].__name__)(event)

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
            program, running = machine.program, self._running(machine)
            if program is None or running is None:
                return
            program.stop_listening()
            await running.finish(event.seconds)

        self._in_program(machine, stop)

    def _running(self, machine: Machine) -> Relay | Server | None:
        relay = self.relays.get(machine.name)
        return self.origin.server if relay is None else relay.relay

    def _in_program(self, machine: Machine, call: Callable[[], Any]) -> None:
        if machine.program is not None:
            machine.program.call(call)

    def truncate(self, event: Event) -> None:
        """The publishers rest meanwhile: their leases forbid it."""
        share = 1 - (event.pick % 100 / 100) ** 2
        self._operate(lambda: self.origin.truncate(share))

    def update(self, event: Event) -> None:
        at = event.pick
        self._operate(lambda: self.origin.update(at))

    def _operate(self, change: Callable[[], bool]) -> None:
        async def operate() -> None:
            for publisher in self.publishers:
                publisher.resting = True
            for _ in range(30):
                if await self._changed(change):
                    break
                await trio.sleep(LOOK_SECONDS)
            for publisher in self.publishers:
                publisher.resting = False

        self._in_background(operate)

    async def _changed(self, change: Callable[[], bool]) -> bool:
        """Whether `change()` was called in the origin's program, and returned True."""
        changed = False
        done = trio.Event()

        async def call() -> None:
            nonlocal changed
            try:
                await trio.lowlevel.checkpoint()
                changed = change()
            finally:
                done.set()

        self._in_program(self.machines[ORIGIN], call)
        with trio.move_on_after(LOOK_SECONDS):
            await done.wait()
        return changed

    def change_bit(self, event: Event) -> None:
        self._change_bit(event, self._servers())

    def change_relay_bit(self, event: Event) -> None:
        self._change_bit(event, [self.machines[name] for name in self.relays])

    def _change_bit(self, event: Event, machines: list[Machine]) -> None:
        flip = self.rot.choose(machines, self._servers(), event.pick, event.more)
        if flip is None:
            return
        machine = self.machines[flip.name]

        self._in_background(machine.kill, event.seconds, lambda: self._flip(machine, flip))

    def _flip(self, machine: Machine, flip: Flip) -> bool:
        changed = self.rot.flip(machine, flip)
        if changed:
            self.trace.note("flip", flip)
            self.trace.named.discard((flip.name, flip.page))
        return changed

    def change_served_bit(self, event: Event) -> None:
        self._in_background(self._change_served_bit, event)

    async def _change_served_bit(self, event: Event) -> None:
        """A page leaves the page cache, and a bit of it changes before it is read again."""
        servers = self._servers()
        for _ in range(_EVICTIONS):
            flip = self.rot.choose(servers, servers, event.pick, event.more)
            if flip is None:
                return
            machine = self.machines[flip.name]
            self.rot.evict(machine, flip.page)
            await trio.sleep(REMEMBERED_SECONDS)
            if self.rot.is_cold(machine, flip.page) and self._flip(machine, flip):
                return

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


_ACTIONS: dict[str, Callable[[Happenings, Event], None]] = {
    faults.LOSE: Happenings.lose,
    faults.PARTITION: Happenings.partition,
    faults.ONE_WAY: Happenings.one_way,
    faults.SLOW: Happenings.slow,
    faults.KILL: Happenings.kill,
    faults.POWER: Happenings.power,
    faults.CRASH: Happenings.crash,
    faults.REFUSE: Happenings.refuse,
    faults.FULL: Happenings.full,
    faults.STOP: Happenings.stop,
    faults.TRUNCATE: Happenings.truncate,
    faults.UPDATE: Happenings.update,
    faults.TAKE_OVER: Happenings.take_over,
    faults.ROT: Happenings.change_bit,
    faults.ROT_RELAY: Happenings.change_relay_bit,
    faults.ROT_SERVED: Happenings.change_served_bit,
    faults.REST: Happenings.rest,
}
