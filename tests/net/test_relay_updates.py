"""Updates in place reach a relay, its own relays, and those that were away meanwhile."""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
import trio

from datastreamer.errors import DatastreamerError
from datastreamer.net import applying, comparing, keeping
from datastreamer.net.applying import Rewritten
from datastreamer.net.client import connect
from datastreamer.net.relay import Relay
from datastreamer.net.session import Session
from datastreamer.protocol.following import NOTHING_KNOWN
from datastreamer.storage.record import Agreement
from datastreamer.storage.stream import DataStream
from tests.net.relaying import Rig, Wire, contents, fill, new, nursery_for, relaying, serving, twin


def update(stream: DataStream, number: int, byte: bytes) -> None:
    entry = stream.entry(number)
    stream.update_entry(number, entry.type, byte * len(entry.data))


async def same(rig: Rig, stream: DataStream) -> None:
    """Returns when the relay's entries are the stream's, all of them."""
    await eventually(rig, lambda: contents(rig.stream) == contents(stream))


async def eventually(rig: Rig, condition: Callable[[], bool]) -> None:
    """Also for what a sync in a thread brings, of which the relay says nothing."""
    while not condition():
        with trio.move_on_after(0.05):
            await rig.relay.until(condition)


def streaming(rig: Rig) -> set[Session]:
    assert rig.relay.server is not None
    return {session for session in rig.relay.server.sessions if session.streaming}


@pytest.fixture
def source(tmp_path: Path) -> Iterator[DataStream]:
    with new(tmp_path / "source.bin") as made:
        yield made


async def settled(rig: Rig, stream: DataStream) -> Agreement:
    """What the relay's file agrees with, once that is the stream as it is now."""

    def is_known() -> bool:
        found = rig.stream.agreement
        return (
            found is not None
            and (found.stream_id, found.epoch) == (stream.stream_id, stream.epoch)
            and found.low == found.high
        )

    await eventually(rig, is_known)
    agreement = rig.stream.agreement
    assert agreement is not None
    return agreement


@pytest.mark.parametrize("sync", ["os", "commit"])
async def test_an_update_reaches_a_chain_of_relays(
    tmp_path: Path, source: DataStream, sync: str
) -> None:
    fill(source, 3000)
    async with nursery_for() as nursery:
        port, rigs = (await serving(nursery, source)).port, []
        for hop in range(3):
            path = tmp_path / f"{hop}.bin"
            rigs.append(await relaying(nursery, path, port, sync=sync, look_seconds=1000))
            port = rigs[-1].port
        await rigs[-1].has(3000)
        before = [streaming(rig) for rig in rigs[:-1]]
        for salt, number in enumerate((1, 1501, 2999, 1)):
            update(source, number, bytes([salt]))
        for rig in rigs:
            await same(rig, source)
        # Nobody was disconnected for it.
        assert before == [streaming(rig) for rig in rigs[:-1]] != [set(), set()]
        fill(source, 10)
        for rig in rigs:
            await same(rig, source)
        upstream = source
        for rig in rigs:
            assert (await settled(rig, upstream)).epoch <= 4
            upstream = rig.stream


async def test_what_was_missed_is_reported_on_the_next_connection(
    tmp_path: Path, source: DataStream
) -> None:
    """More changes than the header page has room for: the server still knows them."""
    fill(source, 3000)
    async with nursery_for() as nursery:
        server = await serving(nursery, source)
        rig = await relaying(nursery, tmp_path / "relay.bin", server.port)
        await rig.has(3000)
        await settled(rig, source)
        await server.stop()
        for number in range(1, 600, 10):
            update(source, number, b"a")
        fill(source, 500)
        await server.start()
        await same(rig, source)
        assert rig.stream.epoch == 60
        await settled(rig, source)
        await rig.stop()
        update(source, 7, b"b")
        update(source, 3499, b"c")
        again = await relaying(nursery, tmp_path / "relay.bin", server.port)
        await same(again, source)
        assert again.stream.epoch == 62
        assert again.relay.uncompared == 0


@pytest.mark.parametrize("kept", [True, False], ids=["same upstream", "nothing known"])
async def test_what_nobody_reports_is_found_by_hashes(
    tmp_path: Path,
    source: DataStream,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    kept: bool,
) -> None:
    """More changes than are known after the source was opened again."""
    monkeypatch.setattr(comparing, "_PIECE_BYTES", 20_000)
    fill(source, 3000)
    async with nursery_for() as nursery:
        server = await serving(nursery, source)
        rig = await relaying(nursery, tmp_path / "relay.bin", server.port)
        await rig.has(3000)
        await settled(rig, source)
        await rig.stop()
        await server.stop()
        numbers = [1, 2, 555, 1234, 1999, 2, 2992, *range(1003, 1030, 3)]
        # The last entry of another file that differs is a sign of another history.
        numbers += [2999] * kept
        for number in numbers:
            update(source, number, b"z")
        source.close()
        if not kept:
            with DataStream.open(tmp_path / "relay.bin", index="memory") as stream:
                stream.note_agreement(None)
                # An update of our own that the upstream does not have.
                update(stream, 77, b"y")
        with DataStream.open(tmp_path / "source.bin", sync="os", index="memory") as stream:
            server = await serving(nursery, stream)
            caplog.set_level(logging.INFO)
            again = await relaying(nursery, tmp_path / "relay.bin", server.port)
            await again.has(3000)
            fill(stream, 10)
            await same(again, stream)
            await settled(again, stream)
            assert again.relay.failure is None
            assert again.stream.epoch == len(set(numbers)) + 2 * (not kept)
            replaced = len(set(numbers)) + (not kept)
            assert caplog.text.count("without our hearing of it") == replaced
            await again.stop()
            # All is known now: nothing is compared again.
            caplog.clear()
            again = await relaying(nursery, tmp_path / "relay.bin", server.port)
            update(stream, 5, b"x")
            await same(again, stream)
            assert "are compared with the upstream's" not in caplog.text


async def test_a_rewritten_history_is_no_update(tmp_path: Path, source: DataStream) -> None:
    """Entries of the same types and lengths, more of them than epochs."""
    fill(source, 3000)
    async with nursery_for() as nursery:
        server = await serving(nursery, source)
        rig = await relaying(nursery, tmp_path / "relay.bin", server.port)
        await rig.has(3000)
        await rig.stop()
        with DataStream.open(tmp_path / "relay.bin", index="memory") as stream:
            stream.note_agreement(None)
            for number in (11, 12, 13, 1001):
                update(stream, number, b"n")
            kept = contents(stream)
        # One of the four may be an update of the source's that was not heard of; these are ours.
        with DataStream.open(tmp_path / "relay.bin", index="memory") as stream:
            before = Agreement(source.stream_id, source.epoch, stream.epoch, 0, 3000, 3)
            stream.note_agreement(before)
        again = await relaying(nursery, tmp_path / "relay.bin", server.port)
        await again.relay.until(lambda: again.relay.failure is not None)
        assert isinstance(again.relay.failure, Rewritten)
        assert again.relay.failure.first_differing == 11
        assert contents(again.stream) == kept
        await again.stop()
        follows = await relaying(nursery, tmp_path / "relay.bin", server.port, on_rewrite="follow")
        await same(follows, source)


async def test_a_truncation_that_was_missed(
    tmp_path: Path, source: DataStream, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the last entries are the same: then older ones are compared by hashes."""
    monkeypatch.setattr(comparing, "_PIECE_BYTES", 20_000)
    fill(source, 3000)
    async with nursery_for() as nursery:
        server = await serving(nursery, source)
        options = {"on_rewrite": "follow"}
        rig = await relaying(nursery, tmp_path / "relay.bin", server.port, **options)
        await rig.has(3000)
        await settled(rig, source)
        await server.stop()
        old = list(source.entries(1000))
        source.truncate(1000)
        with source.atomic_op() as op:
            for entry in old:
                if entry.is_bookmark:
                    op.add_bookmark(entry.data)
                else:
                    op.add_entry(entry.type, b"!" * 40 if entry.number == 1503 else entry.data)
        # The same again: nothing is to be done for it.
        fill(source, 100)
        source.truncate(3000)
        await server.start()
        await same(rig, source)
        await settled(rig, source)
        await rig.stop()
        # Where history is not followed it is left as it was.
        kept = contents(source)
        await server.stop()
        source.truncate(1000)
        fill(source, 2000, salt=b"other")
        await server.start()
        again = await relaying(nursery, tmp_path / "relay.bin", server.port)
        await again.relay.until(lambda: again.relay.failure is not None)
        assert contents(again.stream) == kept


async def test_truncations_that_concern_nobody_are_reported(
    tmp_path: Path, source: DataStream
) -> None:
    fill(source, 50)
    async with nursery_for() as nursery:
        server = await serving(nursery, source)
        wire = Wire(server.port)
        await nursery.start(wire.run)
        rig = await relaying(nursery, tmp_path / "relay.bin", wire.port, on_rewrite="follow")
        await rig.has(50)
        for _ in range(3):
            source.truncate(40)
            fill(source, 20)
            await same(rig, source)
            update(source, 3, b"%d" % source.epoch)
            await same(rig, source)
        await settled(rig, source)
