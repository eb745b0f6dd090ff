"""A simulated bucket, and the archive's threads in simulated time.

Each request takes time. It fails as the bucket's mood says: while it is out, for a machine that is
cut off, or at random; a put may happen although its answer is lost, or much later. Knows no model.
"""

from __future__ import annotations

import contextlib
import os
import random
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextvars import ContextVar
from datetime import UTC, datetime, tzinfo
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import trio
from obstore import exceptions

from datastreamer.archive import archiver, beside, check, follower, restore, writer
from datastreamer.archive.archived_file import ArchivedFile
from datastreamer.storage.bookmarks import memory
from datastreamer.storage.objects import page_runs, store
from datastreamer.storage.objects.opened import MANIFESTS
from datastreamer.storage.objects.store import Stored
from datastreamer.storage.read import file as file_module
from datastreamer.storage.stream import DataStream
from tests.archive import stores
from tests.archive.stores import MemoryStore
from tests.storage.lab.disk import Process
from tests.world.clock import SimTime, nursery_here
from tests.world.drivers import name_here
from tests.world.threads import Stepped, from_thread_run, in_loop, run_stepped
from tests.world.trace import Trace

URL = "s3://bucket/stream"
LATE_SECONDS = 15.0
"""Maximum time after which a put happens whose writer has given up."""

# As in the contract, but in a shorter time.
PRUNE_SECONDS, KEEP_SECONDS, UNNAMED_SECONDS, KEPT = 20.0, 60.0, 40.0, 4

_FAULTS = {
    "put": ("timeout", "lost", "lost", "late", "late", "409", "412", "403", "500"),
    "get": ("timeout", "403", "404", "500", "changed", "short"),
    "get_range": ("timeout", "403", "404", "500", "changed", "short"),
    "list": ("timeout", "403", "404", "500"),
    "delete": ("timeout", "lost", "403", "500"),
}
_OUT = ("timeout", "500")
_LATENCY, _SLOW, _READ = 0.02, 1.5, 0.2

disk_here: ContextVar[Process] = ContextVar("disk_here")
"""Where the current program opens files."""


class Bucket(MemoryStore):
    """The objects, and what goes wrong with requests for them."""

    def __init__(self, chance: random.Random, trace: Trace, nursery: trio.Nursery) -> None:
        super().__init__()
        self.chance, self.trace = chance, trace
        self.injected: Counter[str] = Counter()
        """How many requests failed, by operation and kind."""
        self.odds = 0.0
        """Of a request to fail."""
        self.out = False
        self.cut: set[str] = set()
        """Machines that it does not answer."""
        self.sleeps: dict[str, float] = {}
        """Machines that sleep so long within their next request."""
        self.hurries = False
        """Whether nothing takes time now."""
        self.locked: Callable[[], bool] = lambda: False
        """Whether this thread has a lock that the event loop needs."""
        self.honest = False
        """Whether nothing fails, and nothing takes time: a check of the world asks."""
        self.watching: Callable[[str, str, str, int, int], None] | None = None
        """Called after each request that was answered: machine, operation, name, and range."""
        self.put_now: Callable[[str, bytes], None] = lambda name, data: None
        """Called when an object appears."""
        self._nursery = nursery

    def put(self, name: str, data: bytes) -> None:
        before = name in self.objects
        try:
            super().put(name, data)
        finally:
            if not before and name in self.objects:
                self.trace.note("object", name, len(data))
                self.put_now(name, data)

    @contextlib.contextmanager
    def honestly(self) -> Iterator[None]:
        kept = self.honest, self.fault
        self.honest, self.fault = True, lambda *_: ""
        try:
            yield
        finally:
            self.honest, self.fault = kept

    def draw(self, machine: str, operation: str) -> str:
        """What goes wrong with a request."""
        if self.out or machine in self.cut:
            kinds: Sequence[str] = (*_OUT, "lost") if operation == "put" else _OUT
        elif self.chance.random() < self.odds:
            kinds = _FAULTS[operation]
        else:
            return ""
        found = self.chance.choice(kinds)
        if self.out and found == "lost":
            found = "timeout"
        self.injected[f"{operation} {found}"] += 1
        return found

    def put_late(self, name: str, data: bytes) -> None:
        """Whatever its writer does meanwhile."""
        seconds = self.chance.random() * LATE_SECONDS

        async def later() -> None:
            await trio.sleep(seconds)
            with contextlib.suppress(exceptions.AlreadyExistsError):
                self.fault = lambda *_: ""
                self.put(name, data)

        in_loop(lambda: self._nursery.start_soon(later))


class BucketClient:
    """A bucket as one machine reaches it, from a thread that takes turns with the event loop."""

    def __init__(self, bucket: Bucket, machine: str) -> None:
        self._bucket, self._machine = bucket, machine

    def put(self, name: str, data: bytes) -> None:
        self._ask("put", name, lambda: self._bucket.put(name, data), data)

    def get(self, name: str) -> bytes:
        return self._ask("get", name, lambda: self._bucket.get(name))

    def get_range(self, name: str, start: int, size: int) -> bytes:
        found: bytes = self._ask(
            "get_range", name, lambda: self._bucket.get_range(name, start, size)
        )
        if found == self._bucket.objects.get(name, (b"",))[0][start : start + size]:
            self._answered("get_range", name, start, start + size)
        return found

    def list(self, prefix: str, after: str | None) -> Iterator[Stored]:
        def listed() -> list[Stored]:
            found = list(self._bucket.list(prefix, after))
            self._answered("list", prefix, 0, 0)
            return found

        return iter(self._ask("list", prefix, listed))

    def delete(self, name: str) -> None:
        self._ask("delete", name, lambda: self._bucket.delete(name))

    def _answered(self, operation: str, name: str, start: int, stop: int) -> None:
        bucket = self._bucket
        if bucket.watching is not None and not bucket.honest:
            bucket.watching(self._machine, operation, name, start, stop)

    def _ask(self, operation: str, name: str, call: Callable[[], Any], data: bytes = b"") -> Any:
        bucket = self._bucket
        if bucket.honest:
            return call()
        self._wait(operation, name)
        fault = bucket.draw(self._machine, operation)
        if fault:
            bucket.trace.note("fault", self._machine, operation, name, fault)
        if fault == "late":
            bucket.put_late(name, data)
            fault = "timeout"
        bucket.fault = lambda *_: fault
        try:
            return call()
        finally:
            bucket.fault = lambda *_: ""
            self._wait(operation, name)

    def _wait(self, operation: str, name: str) -> None:
        if self._bucket.hurries or not Stepped.here() or self._bucket.locked():
            return
        chance = self._bucket.chance
        seconds = chance.random() * (_SLOW if chance.random() < 0.05 else _LATENCY)
        if chance.random() < 0.3:
            slept = self._bucket.sleeps.pop(self._machine, 0.0)
            if name.startswith(MANIFESTS) and operation in ("put", "list"):
                # Between these two not for longer than manifests are kept.
                slept = min(slept, KEEP_SECONDS / 3)
            seconds += slept
        from_thread_run(trio.sleep, seconds)


# Threads.


class _Event:
    """Takes the place of `threading.Event`."""

    def __init__(self) -> None:
        self._event = trio.Event()

    def is_set(self) -> bool:
        return self._event.is_set()

    def set(self) -> None:
        in_loop(self._event.set)

    def wait(self, seconds: float) -> bool:
        async def wait() -> None:
            with trio.move_on_after(seconds):
                await self._event.wait()

        from_thread_run(wait)
        return self._event.is_set()


class _Thread:
    """Takes the place of `threading.Thread`: a task of the program that starts it."""

    def __init__(self, target: Callable[[], None], **_: Any) -> None:
        self._target = target
        self._over = _Event()

    def start(self) -> None:
        async def run() -> None:
            try:
                await run_stepped(self._target)
            finally:
                self._over.set()

        in_loop(partial(nursery_here.get().start_soon, run))

    def join(self, seconds: float = 1e9) -> None:
        self._over.wait(seconds)

    def is_alive(self) -> bool:
        return not self._over.is_set()


class _Executor:
    """Takes the place of `ThreadPoolExecutor`: what is submitted is done at once."""

    def __init__(self, *_: Any) -> None:
        pass

    def submit(self, call: Callable[..., Any], *arguments: Any, **more: Any) -> Future[Any]:
        future: Future[Any] = Future()
        try:
            future.set_result(call(*arguments, **more))
        except Exception as error:  # noqa: BLE001 - raised by whoever asks for the result
            future.set_exception(error)
        return future

    def shutdown(self, **_: Any) -> None:
        pass


def _in_turn(_: object, __: int, work: Callable[..., Any], *each: Iterable[Any]) -> Iterator[Any]:
    yield from map(work, *each)


class _SimStream:
    """Takes the place of `DataStream` where the index of a restored file is made: here all indexes
    are in memory."""

    @staticmethod
    @contextlib.contextmanager
    def open(path: str) -> Iterator[SimpleNamespace]:
        with DataStream.open(path, read_only=True, disk=disk_here.get()) as stream:
            bookmarks = SimpleNamespace(wait=lambda: None)
            yield SimpleNamespace(header=stream.header, bookmarks=bookmarks)


def _exists(path: str) -> bool:
    return disk_here.get().exists(path)


class _SimOs:
    """The module `os` where a restore removes checksums."""

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)

    @staticmethod
    def unlink(path: str) -> None:
        disk_here.get().disk.find(path)
        disk_here.get().unlink(path)


def _slowly(bucket: Bucket, read: Callable[..., Any]) -> Callable[..., Any]:
    """A read of the archived file, before and after which its writer may go on."""

    def pause() -> None:
        if Stepped.here() and not bucket.hurries:
            from_thread_run(trio.sleep, bucket.chance.random() * _READ)

    def slowly(*arguments: Any) -> Any:
        pause()
        found = read(*arguments)
        pause()
        return found

    return slowly


@contextlib.contextmanager
def simulated(bucket: Bucket, sim_time: SimTime) -> Iterator[None]:
    """The package archives to `bucket`, in simulated time and on simulated disks."""
    threads = SimpleNamespace(Event=_Event, Thread=_Thread, get_native_id=lambda: 0)

    class SimDatetime:
        @staticmethod
        def now(zone: tzinfo) -> datetime:
            # A list shows whole seconds.
            return datetime.fromtimestamp(int(sim_time.time()), UTC).astimezone(zone)

    with contextlib.ExitStack() as patches:
        for owner, attribute, value in (
            (store, "ObstoreBackend", lambda url, timeout: BucketClient(bucket, name_here.get(""))),
            (store.Store, "_answer", lambda self, call: call()),
            (store.Store, "in_threads", _in_turn),
            # Which works within `submit`, with the lock of its caller.
            (page_runs, "ThreadPoolExecutor", _Executor),
            (page_runs, "threading", SimpleNamespace(Lock=threading.RLock)),
            (archiver, "threading", threads),
            (beside, "os", SimpleNamespace(path=SimpleNamespace(lexists=_exists))),
            (archiver, "sys", SimpleNamespace(platform="simulated")),
            (archiver, "prunable", partial(check.prunable, keep_seconds=KEEP_SECONDS)),
            (archiver, "_PRUNE_SECONDS", PRUNE_SECONDS),
            (follower, "threading", threads),
            (writer, "socket", SimpleNamespace(gethostname=lambda: name_here.get(""))),
            (writer, "os", SimpleNamespace(getpid=lambda: 1)),
            (writer, "_MOST_SECONDS", UNNAMED_SECONDS / 2),
            (check, "_UNNAMED_SECONDS", UNNAMED_SECONDS),
            (check, "_KEPT_MANIFESTS", KEPT),
            (check, "datetime", SimDatetime),
            (stores, "datetime", SimDatetime),
            (file_module, "OsDisk", disk_here.get),
            (restore, "OsDisk", disk_here.get),
            (restore, "index_opener", lambda name: memory.open_index),
            (restore, "DataStream", _SimStream),
            (restore, "os", _SimOs()),
        ):
            patches.enter_context(mock.patch.object(owner, attribute, value))
        for name in ("digests", "page", "last_page", "starts_with", "changes_since"):
            slowly = _slowly(bucket, getattr(ArchivedFile, name))
            patches.enter_context(mock.patch.object(ArchivedFile, name, slowly))
        yield
