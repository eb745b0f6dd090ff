"""Simulated machines and the programs on them: started, killed, without power, and started again.

A machine has a disk of its own (`tests/storage/lab/disk.py`). A program ends by a cancellation in
which nothing gets to its disk or its connections any more, as after `kill -9`, or because an
operation of its disk ends it. Knows no protocol and no model.
"""

from __future__ import annotations

import contextvars
import random
import socket
from collections.abc import Awaitable, Callable

import trio

from tests.storage.lab.cuts import Cut
from tests.storage.lab.disk import Gone, Process, SimDisk
from tests.world.cache import CachedFile
from tests.world.clock import boot_here, nursery_here
from tests.world.network import Network
from tests.world.threads import in_loop

Main = Callable[["Program"], Awaitable[None]]
Accept = Callable[[socket.socket, str], Awaitable[None]]

# A supervisor starts a program again that has ended by itself.
_RESTART_SECONDS = 1.0


class ProgramDisk(Process):
    """A program's view of its disk; its end is the program's."""

    def __init__(self, disk: SimDisk, ended: Callable[[], None]) -> None:
        super().__init__(disk)
        self.lateness = 0
        self.opens = CachedFile
        self._ended = ended

    def end(self) -> None:
        if self.alive:
            super().end()
            in_loop(self._ended)


class Program:
    """One run of a program on a machine."""

    def __init__(self, machine: Machine, main: Main) -> None:
        self.machine = machine
        self.disk = ProgramDisk(machine.disk, self._gone)
        self.over = trio.Event()
        """Set when it has ended, and left nothing behind."""
        self.failure: BaseException | None = None
        self.nursery: trio.Nursery
        self._context: contextvars.Context
        self._main = main
        self._scope = trio.CancelScope()
        self._silently = False
        self._accept: Accept | None = None

    @property
    def alive(self) -> bool:
        return self.disk.alive

    def listen(self, accept: Accept) -> None:
        """Serve connections by `accept` from now on."""
        self._accept = accept

    def stop_listening(self) -> None:
        self._accept = None

    def accept(self, connection: socket.socket, peer: str) -> bool:
        if self._accept is None or not self.alive:
            return False
        self._start(self._accept, connection, peer)
        return True

    def call(self, call: Callable[[], Awaitable[None]]) -> None:
        """Await `call()` in a task of the program, which ends with it."""
        if self.alive and not self._scope.cancel_called:
            self._start(call)

    def _start(self, call: Callable[..., Awaitable[None]], *arguments: object) -> None:
        # Not in the context of the machine that connects, or of the event that calls.
        self._context.run(self.nursery.start_soon, call, *arguments)

    def kill(self, *, silently: bool = False) -> None:
        """End it now; `silently` its system ends too, and sends nothing."""
        self._silently = silently
        self.disk.end()

    def _gone(self) -> None:
        self._accept = None
        self.machine.network.forget(self.machine.name, silently=self._silently)
        # Also where a cleanup replaces the exception that ends it.
        self._scope.cancel()

    async def run(self) -> None:
        token = boot_here.set(lambda: self.machine.disk.boot)
        try:
            with self._scope:
                async with trio.open_nursery() as nursery:
                    self.nursery = nursery
                    nursery_here.set(nursery)
                    self._context = contextvars.copy_context()
                    await self._main(self)
                    nursery.cancel_scope.cancel()
        except BaseException as error:
            rest = _without_end(error) if not self.alive else error
            if rest is not None:
                self.failure = rest
                raise
        finally:
            boot_here.reset(token)
            if self.alive:
                self.disk.end()
            self.over.set()


def _without_end(error: BaseException) -> BaseException | None:
    """What of `error` does not come from the end of a program."""
    inner = getattr(error, "exceptions", None)
    if inner is not None:
        return next((rest for each in inner if (rest := _without_end(each))), None)
    return None if isinstance(error, (Gone, trio.Cancelled)) else error


class Machine:
    """A host with a disk and one program, which is started again whenever it has ended."""

    def __init__(self, name: str, network: Network, chance: random.Random, main: Main) -> None:
        self.name = name
        self.network = network
        self.disk = SimDisk()
        self.program: Program | None = None
        self.powered = True
        self.incarnation = 0
        self.starting = True
        """Whether its program is started again when it has ended."""
        self.on_start: Callable[[], object] = lambda: None
        """Called before each start of its program."""
        self._chance = chance
        self._main = main
        self._changed = trio.Event()
        network.hosts[name] = self

    def accept(self, connection: socket.socket, peer: str) -> bool:
        return self.program is not None and self.program.accept(connection, peer)

    async def run(self) -> None:
        """Run its program, again and again, until cancelled."""
        while True:
            while not (self.powered and self.starting):
                await self._changed.wait()
            self.on_start()
            program = self.program = Program(self, self._main)
            self.network.trace.note("start", self.name)
            await program.run()
            self.program = None
            self.network.trace.note("ended", self.name)
            await trio.sleep(_RESTART_SECONDS * (0.5 + self._chance.random()))

    def _change(self) -> None:
        self._changed.set()
        self._changed = trio.Event()

    async def kill(self, down: float, meanwhile: Callable[[], object] = lambda: None) -> None:
        """Kill the program; call `meanwhile`; the program starts again after `down` seconds."""
        await self._end(silently=False)
        meanwhile()
        await self._start_after(down)

    async def cut_power(self, cut: Cut, down: float) -> None:
        """The machine loses its power, and of its disk what `cut` chooses."""
        self.powered = False
        await self._end(silently=True)
        self.disk = self.disk.power_cut(cut)
        await trio.sleep(down)
        self.powered, self.starting = True, True
        self.incarnation += 1
        self.network.powered(self.name)
        self._change()

    async def _end(self, *, silently: bool) -> None:
        self.starting = False
        program = self.program
        self.network.trace.note("kill", self.name, silently)
        if program is not None:
            program.kill(silently=silently)
            await program.over.wait()

    async def stopped(self, call: Callable[[], Awaitable[object]]) -> None:
        """Kill the program, await `call()`, and start the program again."""
        await self._end(silently=False)
        await call()
        await self._start_after(0.0)

    async def _start_after(self, down: float) -> None:
        await trio.sleep(down)
        self.starting = True
        self._change()
