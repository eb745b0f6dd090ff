"""The programs at the edge: publishers, and clients of every driver.

Owns what they do with their connections, and reports to the model what was acknowledged, received
and removed. An error of the package ends what they do, and they begin again: from where they are,
or, if the history was rewritten, from the start.
"""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import trio

from datastreamer import BlockingClient, aio, connect, connect_publisher
from datastreamer.errors import (
    DatastreamerError,
    Fenced,
    HistoryChanged,
    NotWritten,
    PublishInDoubt,
    SourceBusy,
    UnknownBookmark,
    UnknownEntry,
)
from datastreamer.protocol.resume import Rollback
from datastreamer.publisher.async_publisher import PendingReceipt, Publisher
from datastreamer.selection.clauses import Selection, Where
from tests.storage.lab.image import Image
from tests.storage.made import BOOKMARK
from tests.world.drivers import Stepped, SteppedLoop
from tests.world.machines import Program
from tests.world.model import Model, Operation, Seen
from tests.world.servers import BACKOFF, LEASE_SECONDS, ORIGIN
from tests.world.trace import Trace

Kind = Literal["trio", "asyncio", "thread"]
Sleep = Callable[[float], Awaitable[None]]
Style = Literal["entries", "batches", "commits", "reads", "types"]

TOKEN = "the publishers' token"
KINDS: tuple[Kind, ...] = ("trio", "asyncio", "thread")
STYLES: tuple[Style, ...] = ("entries", "batches", "commits", "reads", "types")
TYPES: Selection = (2, BOOKMARK)
# Bookmarks and half of the entries of a type, by a digit of the operation's number.
WHERE: Selection = (BOOKMARK, *(Where(2, 7, b"%d." % digit) for digit in range(5)))

_PAUSE_SECONDS = 0.5
_MOST_IN_FLIGHT = 8
# Large entries are made slowly, and more slowly the longer the stream is: clients that begin again
# receive all of it.
_BYTES_PER_SECOND = 100_000
_LONG_BYTES = 4 << 20


@dataclass
class Surroundings:
    """What all of them use."""

    model: Model
    chance: random.Random
    trace: Trace
    image: Callable[[], Image]
    """The origin's file now."""


@dataclass
class PublisherProgram:
    """A source of the stream. What it made and has no receipt for outlives a crash, as on a disk
    of its own."""

    around: Surroundings
    name: str
    kind: Kind
    largest: int
    active: bool = False
    """Whether it publishes, or leaves that to another."""
    resting: bool = False
    """Whether an operator asked it to leave the lease for a while."""
    takes_over: bool = False
    publishing: bool = False
    """Whether it is connected, or about to be."""
    unacknowledged: deque[Operation] = field(default_factory=deque)
    firsts: dict[int, int] = field(default_factory=dict)

    @property
    def wanted(self) -> bool:
        return self.active and not self.resting

    async def run(self, program: Program) -> None:
        while True:
            self.publishing = False
            while not self.wanted:
                await trio.sleep(_PAUSE_SECONDS)
            self.publishing = True
            if self.kind == "asyncio":
                loop = SteppedLoop(program.nursery)
                await loop.run(lambda: self._publish(aio.connect_publisher, asyncio.sleep))
            else:
                await self._publish(connect_publisher, trio.sleep)
            await trio.sleep(_PAUSE_SECONDS * (1 + self.around.chance.random()))

    async def _publish(self, connector: Any, sleep: Sleep) -> None:
        resumed = list(self.unacknowledged)
        try:
            async with connector(
                ORIGIN,
                6900,
                token=TOKEN,
                lease=LEASE_SECONDS,
                timeout=4.0,
                retry_for=15.0,
                backoff=BACKOFF,
                take_over=self.takes_over,
                next_entry=self.firsts[resumed[0].number] if resumed else None,
            ) as publisher:
                self.takes_over = False
                lease = publisher._engine.source.lease
                self.around.trace.note("lease", self.name, publisher.epoch, lease.total_entries)
                total, image = lease.total_entries, self.around.image()
                self.around.model.granted(self.name, publisher.epoch, total, image)
                self.unacknowledged.clear()
                await self._operate(publisher, resumed, sleep)
        except (Fenced, SourceBusy) as error:
            self.around.trace.note("not the source", self.name, type(error).__name__)
            if isinstance(error, Fenced):
                self._forget()
                self.active = False
        except HistoryChanged as error:
            self.around.trace.note("other history", self.name, error)
            self._forget()
        except DatastreamerError as error:
            self.around.trace.note("publisher failed", self.name, type(error).__name__, error)

    def _forget(self) -> None:
        """Nobody knows what became of the rest; this program does not send it again."""
        self.unacknowledged.clear()
        self.firsts.clear()

    async def _operate(
        self,
        publisher: Publisher,
        resumed: list[Operation],
        sleep: Sleep,
    ) -> None:
        chance = self.around.chance
        pending: deque[tuple[Operation, PendingReceipt]] = deque()
        for operation in resumed:
            pending.append((operation, await self._put(publisher, operation)))
        while self.wanted or pending:
            while self.wanted and len(pending) <= chance.randrange(_MOST_IN_FLIGHT):
                operation = self.around.model.make(self._sizes(), self.name)
                pending.append((operation, await self._put(publisher, operation)))
            operation, receipt = pending[0]
            try:
                found = await receipt.wait()
            except (NotWritten, PublishInDoubt) as error:
                self.around.trace.note("refused", self.name, type(error).__name__)
                self.around.model.refused(self.name, error)
                await sleep(_PAUSE_SECONDS)
                publisher.resend()
                continue
            pending.popleft()
            self.unacknowledged.popleft()
            self.around.trace.note("receipt", operation.number, found.first_entry)
            image = self.around.image()
            self.around.model.acknowledge(operation, found.first_entry, image)
            rest = chance.random() * 2 if chance.random() < 0.3 else 0.0
            rest += sum(operation.sizes) / _BYTES_PER_SECOND * (1 + image.size / _LONG_BYTES)
            await sleep(rest)

    def _sizes(self) -> list[int]:
        chance = self.around.chance
        sizes = [1 + int(self.largest * chance.random() ** 2) for _ in range(chance.randint(1, 4))]
        if chance.random() < 0.5:
            sizes.insert(0, 0)
        return sizes

    async def _put(self, publisher: Publisher, operation: Operation) -> PendingReceipt:
        operation.epoch = publisher.epoch
        op = publisher.atomic_op()
        self.firsts[operation.number] = publisher.next_entry
        self.unacknowledged.append(operation)
        for kind, data in operation.items():
            if kind == BOOKMARK:
                op.add_bookmark(data)
            else:
                op.add_entry(kind, data)
        return await op.commit(wait=False)


@dataclass
class ClientProgram:
    """A client of one server, or of several, which streams, and queries now and then."""

    around: Surroundings
    name: str
    kind: Kind
    style: Style
    servers: tuple[str, ...]
    seen: Seen = field(init=False)

    def __post_init__(self) -> None:
        where: Selection = WHERE if int(self.name[-1]) % 2 else TYPES
        self.seen = Seen(self.name, where=where if self.style == "types" else ())
        self._position: Any = None

    @property
    def _options(self) -> dict[str, Any]:
        return {"timeout": 4.0, "heartbeat": 4.0, "backoff": BACKOFF, "retry_for": 60.0}

    async def run(self, program: Program) -> None:
        while True:
            try:
                if self.kind == "thread":
                    await Stepped(self._run_blocking).run()
                elif self.kind == "asyncio":
                    run = partial(self._run, aio.connect, asyncio.sleep)
                    await SteppedLoop(program.nursery).run(run)
                else:
                    await self._run(connect, trio.sleep)
            except HistoryChanged as error:
                self.around.trace.note("other history", self.name, error)
                self._start_over()
            except DatastreamerError as error:
                self.around.trace.note("client failed", self.name, type(error).__name__, error)
            await trio.sleep(_PAUSE_SECONDS * (1 + self.around.chance.random()))

    def _start_over(self) -> None:
        self.around.model.rewind(self.seen, 0)
        self._position = None
        self.seen.restarts += 1

    def _iterate(self, client: Any) -> Any:
        """The iterator over what the server sends from the client's position on."""
        start: dict[str, Any] = {"on_rollback": self._rewind}
        if self._position is not None:
            start["from_position"] = self._position
        if self.style == "entries":
            return client.entries(**start)
        if self.style == "reads":
            return client.read_batches(max_count=5, **start)
        if self.style == "types":
            return client.batches(where=self.seen.where, **start)
        return client.batches(commits=self.style == "commits", **start)

    def _rewind(self, rollback: Rollback) -> None:
        self.around.trace.note("rollback", self.name, rollback.to_entry, rollback.from_entry)
        self.around.model.rewind(self.seen, rollback.to_entry)
        self._position = rollback.position

    def _take(self, item: Any, iterator: Any) -> None:
        model, image = self.around.model, self.around.image()
        batch = [item] if self.style == "entries" else item
        for entry in batch:
            model.deliver(self.seen, entry.number, (entry.type, bytes(entry.data)), image)
        if self.style != "entries":
            self.seen.next = item.next_number
        self._position = iterator.position

    def _pick(self) -> int:
        return self.around.chance.randrange(max(1, self.seen.next))

    async def _run(self, connector: Any, sleep: Sleep) -> None:
        async with connector(self.servers, **self._options) as client:
            while True:
                async with self._iterate(client) as found:
                    async for item in found:
                        self._take(item, found)
                        if self._leaves():
                            break
                method, what = self._query()
                try:
                    self._answered(await getattr(client, method)(what))
                except (UnknownEntry, UnknownBookmark):
                    self.around.trace.note("not found", self.name)
                await sleep(self._pause())

    def _run_blocking(self) -> None:
        with BlockingClient(self.servers, **self._options) as client:
            while True:
                with self._iterate(client) as found:
                    for item in found:
                        self._take(item, found)
                        if self._leaves():
                            break
                method, what = self._query()
                try:
                    self._answered(getattr(client, method)(what))
                except (UnknownEntry, UnknownBookmark):
                    self.around.trace.note("not found", self.name)
                Stepped.running().wait(partial(trio.sleep, self._pause()))

    def _leaves(self) -> bool:
        """Whether to end the iteration here, and go on with a query: seldom, since the next one
        compares hundreds of entries."""
        return self.around.chance.random() < (0.005 if self.style == "entries" else 0.02)

    def _pause(self) -> float:
        # Reads end at the head.
        return self.around.chance.random() * _PAUSE_SECONDS * (16 if self.style == "reads" else 2)

    def _query(self) -> tuple[str, int | bytes]:
        """What to ask: an entry, or a bookmark."""
        model, chance = self.around.model, self.around.chance
        number = chance.randrange(max(1, self.seen.next))
        if chance.random() < 0.5 and number < len(model.history):
            operation = model.operations[model.history[number].op]
            if not operation.sizes[0]:
                return "bookmark", b"b%07d" % operation.number
        return "entry", number

    def _answered(self, entry: Any) -> None:
        item = entry.type, bytes(entry.data)
        self.around.model.check_entry(entry.number, item, self.around.image())
