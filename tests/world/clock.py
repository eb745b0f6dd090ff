"""Simulated time and chance: a run of Trio that a seed repeats exactly.

Owns all that the package takes from the system apart from disks and the network: clocks, sleeps,
random numbers, the order of tasks, and threads. A thread's work is done in the event loop, at a
time that the seed chooses; a thread that syncs is a task of the program that it belongs to.
"""

from __future__ import annotations

import contextlib
import functools
import os
import random
import secrets
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from contextvars import ContextVar
from typing import Any, TypeVar
from unittest import mock

import trio
import trio.testing

from datastreamer.archive import beside
from datastreamer.relay.writer import RelayWriter
from datastreamer.server import scrub
from datastreamer.server import server as server_module
from datastreamer.server.streaming import feed
from datastreamer.storage.bookmarks.builder import IndexBuilder
from datastreamer.storage.pages import completer
from datastreamer.storage.parts import StreamPages
from datastreamer.storage.write import sync_policy
from datastreamer.storage.write.background import PendingCommit
from tests.storage.lab.model import booted
from tests.world import cache
from tests.world.threads import Stepped, from_thread_run, from_thread_run_sync, in_loop, run_stepped

T = TypeVar("T")

# A wall clock that starts on some day.
_DAY = 1_700_000_000.0
# Longest wait of a thread for its processor and its disk.
_THREAD_SECONDS = 0.01
# A disk is slow at times.
_SLOW_SYNCS = 0.05
_SLOW_SYNC_SECONDS = 0.6
# Polls are a second look at what wakes them anyway; every 10 ms they would be most of the work.
_POLL_SECONDS = 0.5
_INDEX_SECONDS = 2.0
# Between two passes of a scrub.
_PASS_SECONDS = 20.0

# As many steps of tasks at one time are a loop without end.
_MOST_STEPS = 50_000

nursery_here: ContextVar[trio.Nursery] = ContextVar("nursery_here")
"""Where threads of the current program run."""

boot_here: ContextVar[Callable[[], bytes]] = ContextVar("boot_here")
"""The boot id of the current program's machine."""


class StandsStill(AssertionError):
    """Programs run, and time does not pass."""


class SimTime:
    """Takes the place of the module `time` in the package."""

    def __init__(self, clock: trio.testing.MockClock) -> None:
        self._clock = clock

    def monotonic(self) -> float:
        return self._clock.current_time()

    perf_counter = monotonic

    def monotonic_ns(self) -> int:
        return int(self.monotonic() * 1e9)

    def time(self) -> float:
        return _DAY + self.monotonic()

    def time_ns(self) -> int:
        return int(self.time() * 1e9)

    def sleep(self, seconds: float) -> None:
        if Stepped.here():
            from_thread_run(trio.sleep, seconds)
        else:
            self._clock.jump(seconds)

    def strftime(self, form: str) -> str:
        return time.strftime(form, time.gmtime(self.time()))


class SimSecrets:
    """Takes the place of the module `secrets`."""

    def __init__(self, chance: random.Random) -> None:
        self.token_bytes, self.randbits = chance.randbytes, chance.getrandbits
        self._chance = chance

    def token_hex(self, size: int) -> str:
        return self._chance.randbytes(size).hex()


class TaskSyncer:
    """Takes the place of `Syncer`: its thread is a task of the program that it belongs to."""

    def __init__(self, chance: random.Random, work: Callable[[], None]) -> None:
        self._chance = chance
        self._work = work
        self._nursery = nursery_here.get()
        self._due = float("inf")
        self._asked = trio.Event()
        self.closing = self._started = False

    def request(self, seconds: float = 0.0, *, urgent: bool = False) -> None:
        in_loop(functools.partial(self._request, seconds))

    def _request(self, seconds: float) -> None:
        self._due = min(self._due, trio.current_time() + seconds)
        self._asked.set()
        if not self._started and not self.closing:
            self._started = True
            self._nursery.start_soon(self._run)

    async def _run(self) -> None:
        while not self.closing:
            self._asked = trio.Event()
            with trio.move_on_at(self._due):
                await self._asked.wait()
            if trio.current_time() >= self._due:
                slowly = self._chance.random() < _SLOW_SYNCS
                most = _SLOW_SYNC_SECONDS if slowly else _THREAD_SECONDS
                await trio.sleep(self._chance.random() * most)
                self._due = float("inf")
                if not self.closing:
                    self._work()

    def close(self) -> None:
        self.closing = True
        in_loop(self._asked.set)


def _start_builder(builder: IndexBuilder, *, once: bool = False) -> None:
    """Takes the place of `IndexBuilder.start`."""

    async def run() -> None:
        await trio.lowlevel.checkpoint()
        while not builder.closing:
            builder.work()
            if once:
                return
            await trio.sleep(_INDEX_SECONDS)

    nursery = nursery_here.get()
    in_loop(lambda: nursery.start_soon(run))


def _threads(chance: random.Random) -> Callable[..., Awaitable[Any]]:
    async def pause() -> None:
        with trio.CancelScope(shield=True):
            await trio.sleep(chance.random() * _THREAD_SECONDS)

    async def run_sync(call: Callable[..., T], *arguments: Any, **_: Any) -> T:
        await trio.lowlevel.checkpoint_if_cancelled()
        await pause()
        owner = getattr(call, "__self__", None)
        if isinstance(owner, PendingCommit) and not arguments:
            # It would wait in its thread for another thread.
            with trio.CancelScope(shield=True):
                while not call(0):  # type: ignore[call-arg]
                    await trio.sleep(0.001)
        method = getattr(getattr(call, "func", None), "__func__", None)
        archives = isinstance(owner, contextlib.ExitStack) or (
            getattr(call, "func", None) is beside.restored
        )
        if isinstance(owner, RelayWriter) or method is StreamPages.heal or archives:
            # It asks another server, or a bucket, from its thread.
            result = await run_stepped(call, *arguments)
        else:
            result = call(*arguments)
        await pause()
        return result

    return run_sync


def _boot_id() -> bytes:
    return boot_here.get()()


@contextlib.contextmanager
def simulated(sim_time: SimTime, chance: random.Random) -> Iterator[None]:
    """The package takes time, chance and threads from `sim_time` and `chance`."""
    replacements: dict[object, object] = {
        time: sim_time,
        random: chance,
        secrets: SimSecrets(chance),
    }
    with contextlib.ExitStack() as patches:
        for name, module in sorted(sys.modules.items()):
            if not name.startswith("datastreamer."):
                continue
            for attribute in ("time", "random", "secrets"):
                found = vars(module).get(attribute)
                if found in (time, random, secrets):
                    replace = mock.patch.object(module, attribute, replacements[found])
                    patches.enter_context(replace)
        syncer = functools.partial(TaskSyncer, chance)
        for owner, attribute, value in (
            (os, "urandom", chance.randbytes),
            (trio.to_thread, "run_sync", _threads(chance)),
            (trio.from_thread, "run", from_thread_run),
            (trio.from_thread, "run_sync", from_thread_run_sync),
            (sync_policy, "Syncer", syncer),
            (completer, "Syncer", syncer),
            (IndexBuilder, "start", _start_builder),
            # Other tasks run between any two members of a pass.
            (feed, "_PASS_NS", -1),
            (server_module, "_POLL_SECONDS", _POLL_SECONDS),
            (scrub, "_PASS_SECONDS", _PASS_SECONDS),
            # Trio's own switch for tests that must be repeatable.
            (trio._core._run, "_ALLOW_DETERMINISTIC_SCHEDULING", True),  # type: ignore[attr-defined]
            (trio._core._run, "_r", random.Random(chance.random())),  # type: ignore[attr-defined]
        ):
            patches.enter_context(mock.patch.object(owner, attribute, value))
        patches.enter_context(booted(_boot_id))
        patches.enter_context(cache.simulated())
        yield


class Standstill(trio.abc.Instrument):
    """Cancels a run in which tasks run and run, and time does not pass."""

    def __init__(self, clock: trio.testing.MockClock) -> None:
        self.scope = trio.CancelScope()
        self.found = False
        self._clock = clock
        self._at = 0.0
        self._steps = 0

    def before_task_step(self, task: trio.lowlevel.Task) -> None:
        self._steps += 1
        if self._steps % _MOST_STEPS == 0:
            before, self._at = self._at, self._clock.current_time()
            if self._at == before:
                self.found = True
                self.scope.cancel()


def run(main: Callable[[SimTime], Awaitable[None]], chance: random.Random) -> None:
    """Await `main` in simulated time. Raises `StandsStill`."""
    clock = trio.testing.MockClock(autojump_threshold=0)
    sim_time, standstill = SimTime(clock), Standstill(clock)

    async def watched() -> None:
        with standstill.scope:
            await main(sim_time)

    with simulated(sim_time, chance):
        trio.run(watched, clock=clock, instruments=[standstill])
    if standstill.found:
        raise StandsStill(f"tasks run without end at {clock.current_time():g} s")
