"""Truncations and updates under clients of every kind: who is concerned, and what he saw.

`made_for` builds streams in which a client that stops reading is caught at a known place:
three MiB are copied into its socket, ten are handed to the kernel by reference.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from datastreamer.server.session import Session
from datastreamer.server.streaming.catch_up import State
from datastreamer.storage.stream import DataStream
from tests.network import model as wire
from tests.network.fixtures import Open, Peer, Rig, append, over_loopback, over_unix, seeds
from tests.network.model import OK, Model

MIB = 1 << 20
SMALL_BUFFER = 4096

Change = Callable[[], None]


def modelled(stream: DataStream) -> Model:
    return Model(Path(stream.path).read_bytes())


async def from_the_loop(change: Change) -> None:
    change()


async def from_a_thread(change: Change) -> None:
    await trio.to_thread.run_sync(change)


async def from_a_plain_thread(change: Change) -> None:
    thread = threading.Thread(target=change)
    thread.start()
    while thread.is_alive():
        await trio.lowlevel.checkpoint()
    thread.join()


ways = pytest.mark.parametrize("do", [from_the_loop, from_a_thread, from_a_plain_thread])


@pytest.fixture
def copied(stream: DataStream) -> DataStream:
    """3 MiB: entries of 60 kB."""
    append(stream, *[(1, bytes([n]) * 60_000) for n in range(52)])
    return stream


@pytest.fixture
def referred(stream: DataStream) -> DataStream:
    """10 MiB: entries of 20 kB, some 52 a page."""
    append(stream, *[(1, bytes([n % 251]) * 20_000) for n in range(520)])
    return stream


async def stalled(rig: Rig, peer: Peer) -> Session:
    """Its session, once the client's buffers are full."""
    await peer.ask(wire.start(0), OK)
    await wait_all_tasks_blocked(0.002)
    name = peer.stream.socket.getsockname()  # type: ignore[attr-defined]
    [session] = [s for s in rig.server.sessions if s.transport.peer == f"{name[0]}:{name[1]}"]
    assert session.streaming
    return session


def update(stream: DataStream, number: int) -> Change:
    entry = stream.entry(number)
    return lambda: stream.update_entry(number, entry.type, bytes(len(entry.data)))


async def read_packed(peer: Peer, entries: int, size: int) -> bytes:
    return await peer.read(entries * (17 + size))


@ways
async def test_truncation_ends_only_clients_that_are_past_it(
    referred: DataStream, do: Callable[[Change], trio.abc.AsyncResource]
) -> None:
    stream, old = referred, modelled(referred)
    async with over_loopback(stream, receive_buffer=SMALL_BUFFER) as rig, AsyncExitStack() as stack:
        live, caught_up, early, idle, stopped = [
            await stack.enter_async_context(rig.client()) for _ in range(5)
        ]
        await live.ask(wire.start(520), OK)
        await caught_up.ask(wire.start(490), OK + old.packed(490))
        await stopped.ask(wire.start(510), OK + old.packed(510))
        await stopped.ask(wire.stop(), OK)
        await idle.ask(wire.entry(515), OK + b"\xfe" + old.packed(515, 516)[1:])
        before = await stalled(rig, early)
        await do(lambda: stream.truncate(500))
        assert await live.was_reset() == b""
        assert await caught_up.was_reset() == b""
        append(stream, *[(2, b"new" * 1000)] * 40)
        model = modelled(stream)
        assert len(model.entries) == 540
        assert before.streaming
        await early.expect(model.packed())
        await idle.ask(wire.entry(515), OK + b"\xfe" + model.packed(515, 516)[1:])
        await stopped.ask(wire.start(520), OK + model.packed(520))
        await wait_all_tasks_blocked()
        append(stream, (3, b"live"))
        for peer in (early, stopped):
            await peer.expect(modelled(stream).packed(540))
            await peer.nothing_more()


@ways
@pytest.mark.parametrize("behind", [0, 1, 2, 7])
async def test_truncation_close_behind_a_stalled_client(
    referred: DataStream, behind: int, do: Callable[[Change], trio.abc.AsyncResource]
) -> None:
    """In the page that it is in: it gets what is left and then what is new, or is ended."""
    stream = referred
    async with over_loopback(stream, receive_buffer=SMALL_BUFFER) as rig, rig.client() as peer:
        session = await stalled(rig, peer)
        assert session.sender.span is not None
        number = (
            next(n for n in range(520) if stream.reader.cursor(n).offset >= session.sender.at)
            + behind
        )
        assert stream.reader.cursor(number).offset < session.sender.span.end
        await do(lambda: stream.truncate(number))
        append(stream, (2, b"new"))
        await peer.expect(modelled(stream).packed())
        await peer.nothing_more()


@pytest.mark.parametrize("before", [0, 1, 3])
async def test_truncation_of_what_the_kernel_was_only_pointed_to(
    referred: DataStream, before: int
) -> None:
    """The bytes would be overwritten before they are sent."""
    stream, old = referred, modelled(referred)
    async with over_loopback(stream, receive_buffer=SMALL_BUFFER) as rig, rig.client() as peer:
        session = await stalled(rig, peer)
        number = (
            max(n for n in range(520) if stream.reader.cursor(n).offset < session.sender.at)
            - before
        )
        stream.truncate(number)
        append(stream, *[(2, b"\xaa" * 20_000)] * 60)
        got = await peer.was_reset()
        assert old.packed().startswith(got)


@ways
async def test_update_in_the_middle_of_a_copied_entry(
    copied: DataStream, do: Callable[[Change], trio.abc.AsyncResource]
) -> None:
    stream, old = copied, modelled(copied)
    async with over_loopback(stream, receive_buffer=SMALL_BUFFER) as rig, rig.client() as peer:
        session = await stalled(rig, peer)
        assert session.sender.span is None
        number = max(n for n in range(52) if stream.reader.cursor(n).offset < session.sender.at)
        assert session.sender.at < stream.reader.cursor(number + 1).offset, "not in mid-entry"
        await do(update(stream, number))
        got = await peer.was_reset()
        assert old.packed().startswith(got)


@pytest.mark.parametrize("stopped", [False, True], ids=["streaming", "stopped"])
async def test_update_of_what_the_kernel_was_only_pointed_to(
    referred: DataStream, stopped: bool
) -> None:
    stream, old = referred, modelled(referred)
    async with over_loopback(stream, receive_buffer=SMALL_BUFFER) as rig, rig.client() as peer:
        session = await stalled(rig, peer)
        number = max(
            n for n in range(518) if stream.reader.cursor(n + 2).offset < session.sender.at
        )
        got = b""
        if stopped:
            await peer.send(wire.stop())
            while session.protocol.streaming:
                got += await peer.read(2_000)
                await wait_all_tasks_blocked()
        update(stream, number)()
        got += await peer.was_reset()
        assert old.packed().startswith(got)


@ways
async def test_update_of_what_a_client_has_or_will_get(
    referred: DataStream, do: Callable[[Change], trio.abc.AsyncResource]
) -> None:
    stream, old = referred, modelled(referred)
    async with over_loopback(stream, receive_buffer=SMALL_BUFFER) as rig, AsyncExitStack() as stack:
        live, early, beyond = [await stack.enter_async_context(rig.client()) for _ in range(3)]
        await live.ask(wire.start(510), OK + old.packed(510))
        await beyond.ask(wire.start(515), OK + old.packed(515))
        await stalled(rig, early)
        await do(update(stream, 512))
        await do(update(stream, 400))
        model = modelled(stream)
        await early.expect(model.packed())
        append(stream, (3, b"live"))
        for peer in (live, early, beyond):
            await peer.expect(modelled(stream).packed(520))
            await peer.nothing_more()


async def test_a_change_and_a_pass_that_has_served_half_of_its_clients(
    stream: DataStream, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who had the run before the change, and who did not, both get all that follows."""
    from datastreamer.server.streaming import broadcast as live_module

    monkeypatch.setattr(live_module, "_PASS_NS", 0)  # eight clients a call
    append(stream, (1, b"old"))
    async with over_loopback(stream) as rig, AsyncExitStack() as stack:
        peers = [await stack.enter_async_context(rig.client()) for _ in range(40)]
        for peer in peers:
            await peer.ask(wire.start(1), OK)
        await wait_all_tasks_blocked()
        assert {s.state for s in rig.server.sessions} == {State.LIVE}
        halfway = 0
        for turn in range(20):
            append(stream, (1, b"first %d" % turn))
            while not any(
                s.sender.cursor.number == stream.total_entries for s in rig.server.sessions
            ):
                await trio.lowlevel.checkpoint()
            halfway += any(
                s.sender.cursor.number < stream.total_entries for s in rig.server.sessions
            )
            with stream.parts.feed.change(0, 1):  # as while a thread updates entry 0
                await wait_all_tasks_blocked()
            append(stream, (2, b"second %d" % turn))
        assert halfway > 5
        model = modelled(stream)
        for peer in peers:
            await peer.expect(model.packed(1))
            await peer.nothing_more()


async def test_after_a_change_that_fails_all_clients_continue(
    copied: DataStream, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(28, "no space")

    async with over_loopback(copied) as rig, rig.client() as peer:
        await peer.ask(wire.start(51), OK + modelled(copied).packed(51))
        with monkeypatch.context() as patch:
            patch.setattr("datastreamer.storage.write.changes.ChangeWriter.update", refuse)
            with pytest.raises(OSError, match="no space"):
                update(copied, 3)()
        append(copied, (1, b"on"))
        await peer.expect(modelled(copied).packed(52))
        await peer.nothing_more()


async def test_a_page_that_cannot_be_read_does_not_hold_a_change_for_ever(
    copied: DataStream, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server does not know whom it concerns: the change is refused, clients continue."""
    async with over_loopback(copied) as rig, rig.client() as peer:
        await peer.ask(wire.start(52), OK)
        calls, entry = 0, copied.entry(3)
        real = type(copied.reader).cursor

        def fail_once(self: object, number: int) -> object:
            nonlocal calls
            calls += 1
            if calls == 2:
                raise OSError(5, "from the callback")
            return real(self, number)  # type: ignore[arg-type]

        with monkeypatch.context() as patch:
            patch.setattr(type(copied.reader), "cursor", fail_once)
            with pytest.raises(OSError, match="from the callback"):
                copied.update_entry(3, entry.type, entry.data[::-1])
        append(copied, (1, b"on"))
        await peer.expect(modelled(copied).packed(52))


@seeds(1, 200)
@pytest.mark.parametrize("way", ["tcp", "tls", "unix"])
async def test_changes_at_random_under_many_clients(
    stream: DataStream, seed: int, way: str, secured: Open
) -> None:
    """Each client keeps every byte: all of it was committed, in order, and never half changed.

    The writer is a thread that appends, truncates and updates; after a truncation entries
    of the same sizes come back with other contents, so that offsets and numbers fit.
    """
    versions: dict[int, set[bytes]] = {}
    choose = random.Random(seed)
    sizes = [0, 3, 300, 5_000, 70_000, 200_000]
    generation = 0
    highest = 0

    def note(first: int) -> None:
        for entry in stream.entries(first):
            versions.setdefault(entry.number, set()).add(entry.pack())

    def recent() -> int | None:
        """An entry that was never handed to a client's kernel by reference: one that is read
        on this machine would show the change, however long it was sent before."""
        total = stream.total_entries
        fit = [
            n
            for n in range(max(0, total - 80), total)
            if stream.reader.cursor(n).offset > highest - 3.9 * MIB
        ]
        return choose.choice(fit) if fit else None

    def write() -> None:
        nonlocal generation, highest
        for _ in range(12):
            generation += 1
            what = choose.random()
            highest = max(highest, stream.header.total_length)
            number = recent()
            if what < 0.2 and number is not None:
                stream.truncate(number)
            elif what < 0.4 and number is not None:
                entry = stream.entry(number)
                changed = bytes([generation % 256]) * len(entry.data)
                versions[number].add(wire.pack(number, entry.type, changed))
                stream.update_entry(number, entry.type, changed)
            else:
                for _ in range(choose.randrange(1, 4)):
                    first = stream.total_entries
                    count = choose.randrange(1, 12)
                    datas = [
                        bytes([generation % 256]) * sizes[n % 6]
                        for n in range(first, first + count)
                    ]
                    for at, data in enumerate(datas):
                        versions.setdefault(first + at, set()).add(wire.pack(first + at, 1, data))
                    append(stream, *[(1, data) for data in datas])

    append(stream, *[(1, bytes(sizes[n % 6])) for n in range(180)])
    note(0)
    ended = survived = 0

    async def client(rig: Rig, first: int, lazy: bool) -> None:
        nonlocal ended, survived
        async with rig.client() as peer:
            await peer.send(wire.start(first))
            number = first
            try:
                answer = await peer.packet()
                if answer != OK:
                    return
                while not done.is_set() or number < stream.total_entries:
                    packet = await peer.packet()
                    assert packet in versions[number], f"entry {number} was never so"
                    number += 1
                    if lazy and number % 5 == 0:
                        for _ in range(50):
                            await trio.lowlevel.checkpoint()
                survived += 1
            except trio.BrokenResourceError:
                ended += 1
            except trio.Cancelled:
                survived += 1
                raise

    done = trio.Event()
    open_server = {"tcp": over_loopback, "tls": secured, "unix": over_unix}[way]
    async with open_server(stream, receive_buffer=32_768) as rig, trio.open_nursery() as nursery:
        for _ in range(12):
            for n in range(4):
                first = choose.randrange(max(1, stream.total_entries))
                nursery.start_soon(client, rig, first, n == 0)
            await trio.to_thread.run_sync(write)
        done.set()
        await wait_all_tasks_blocked()
        nursery.cancel_scope.cancel()
    assert ended
    assert survived
