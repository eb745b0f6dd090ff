"""A server whose live clients are served by its thread, and clients of it.

The fixtures are a stream as another process writes it, and as a server reads it.
"""

from __future__ import annotations

import contextlib
import os
import select
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest

from datastreamer.server.streaming import broadcast as broadcast_module
from datastreamer.server.streaming.catch_up import State
from datastreamer.storage.stream import DataStream
from tests.network import model as wire
from tests.network.fixtures import Peer, Rig, append, over_loopback, until
from tests.network.model import OK, Model

PATIENCE = 60


def modelled(stream: DataStream) -> Model:
    return Model(Path(stream.path).read_bytes())


@pytest.fixture
def writer(path: Path) -> Iterator[DataStream]:
    """The stream, as another process writes it."""
    with DataStream.create(path, sync="os", index="memory") as made:
        append(made, (1, b"first"))
        yield made


@pytest.fixture
def follower(writer: DataStream, path: Path) -> Iterator[DataStream]:
    with DataStream.open(path, follow=True, index="memory") as opened:
        yield opened


@pytest.fixture
def waker(writer: DataStream) -> Iterator[int]:
    """Readable after each commit."""
    fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
    writer.parts.writer.add_waker(fd)
    yield fd
    writer.parts.writer.remove_waker(fd)
    os.close(fd)


@pytest.fixture
def only_the_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """No poll of the event loop helps."""
    monkeypatch.setattr(broadcast_module, "_LOOK_SECONDS", 1_000)


def is_armed(rig: Rig) -> bool:
    return rig.server.broadcast._live.armed


async def armed(rig: Rig, writer: DataStream) -> None:
    """Return when the thread serves all clients, which are live: soon after a commit."""
    await until(lambda: {s.state for s in rig.server.sessions} == {State.LIVE})
    await until(lambda: is_armed(rig) or append(writer, (9, b"a commit")))


@contextlib.contextmanager
def early_waker(writer: DataStream) -> Iterator[int]:
    """Readable when a commit begins after a pause."""
    fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
    writer.parts.writer.add_early_waker(fd)
    try:
        yield fd
    finally:
        writer.parts.writer.remove_waker(fd)
        os.close(fd)


@asynccontextmanager
async def streaming(
    writer: DataStream,
    follower: DataStream,
    waker: int,
    clients: int,
    *,
    receive_buffer: int | None = None,
) -> AsyncIterator[tuple[Rig, list[Peer]]]:
    """A server and clients of its thread, which have received everything."""
    async with AsyncExitStack() as stack:
        early = stack.enter_context(early_waker(writer))
        rig = await stack.enter_async_context(
            over_loopback(follower, waker=waker, early_waker=early, receive_buffer=receive_buffer)
        )
        peers = [await stack.enter_async_context(rig.client()) for _ in range(clients)]
        for peer in peers:
            await peer.ask(wire.start(0), OK + modelled(writer).packed())
        total = writer.total_entries
        await armed(rig, writer)
        for peer in peers:
            await peer.expect(modelled(writer).packed(total))
        yield rig, peers


@contextlib.contextmanager
def in_thread(work: Callable[[threading.Event], None]) -> Iterator[None]:
    """`work(stop)` in a thread until the end of the block; raises what it raises."""
    stop, failures = threading.Event(), list[BaseException]()

    def run() -> None:
        try:
            work(stop)
        except BaseException as error:  # noqa: BLE001 - raised below
            failures.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join(PATIENCE)
    assert not failures, failures


def readable(fd: int) -> bool:
    return bool(select.select([fd], [], [], 0)[0])
