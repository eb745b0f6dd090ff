"""Updates in place reach a relay, its own relays, and those that were away meanwhile."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import trio

from datastreamer._codec import Entry
from datastreamer.errors import NotFound
from datastreamer.format import FEATURE_PAGE_SUMS
from datastreamer.protocol.commands import CapabilitiesQuery, FollowStart
from datastreamer.protocol.following import FollowBegun, Reports, encode_truncation, encode_update
from datastreamer.protocol.messages import OK, Capabilities, encode_commit
from datastreamer.protocol.server import Event
from datastreamer.relay import apply_changes
from datastreamer.relay import compare as comparing
from datastreamer.relay.apply_changes import UpstreamRewritten
from datastreamer.server.session import Session
from datastreamer.storage.header.records import Agreement
from datastreamer.storage.read.range_sums import hash_range
from datastreamer.storage.read.reader import Reader, truncated_below
from datastreamer.storage.stream import DataStream
from tests.network.proxy import NONE, FaultyServer
from tests.network.stub import Stub, sample
from tests.relay.relaying import (
    Rig,
    Wire,
    contents,
    fill,
    new,
    nursery_for,
    relaying,
    serving,
    twin,
)


def update(stream: DataStream, number: int, byte: bytes) -> None:
    entry = stream.entry(number)
    stream.update_entry(number, entry.type, byte * len(entry.data))


async def same(rig: Rig, stream: DataStream) -> None:
    """Returns when the relay's entries are the stream's, all of them."""

    def are_equal() -> bool:
        try:
            return packed(rig.stream) == packed(stream)
        except NotFound:
            return False  # the relay truncated its file meanwhile

    await eventually(rig, are_equal)


def packed(stream: DataStream) -> bytes:
    return b"".join([batch.packed() for batch in stream.batches(0)])


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
        found = rig.stream.parts.relay.agreement
        return (
            found is not None
            and (found.stream_id, found.epoch) == (stream.stream_id, stream.epoch)
            and found.low == found.high
        )

    await eventually(rig, is_known)
    agreement = rig.stream.parts.relay.agreement
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
        # No client was disconnected for it.
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
        assert again.download.uncompared == 0


@pytest.mark.parametrize("kept", [True, False], ids=["same upstream", "nothing known"])
async def test_what_is_not_reported_is_found_by_hashes(
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
        numbers = [1, 2, 555, 1234, 1999, 2, *range(1003, 1030, 3)]
        # One of the last entries of another file that differs is a sign of another history.
        numbers += [2992, 2999] * kept
        for number in numbers:
            update(source, number, b"z")
        source.close()
        if not kept:
            with DataStream.open(tmp_path / "relay.bin", index="memory") as stream:
                stream.parts.relay.put_agreement(None)
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
            assert caplog.text.count("and did not report it") == replaced
            await again.stop()
            # All is known now: nothing is compared again.
            caplog.clear()
            again = await relaying(nursery, tmp_path / "relay.bin", server.port)
            update(stream, 5, b"x")
            await same(again, stream)
            assert "comparing entries" not in caplog.text


async def test_a_rewritten_history_is_no_update(
    tmp_path: Path, source: DataStream, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Entries of the same types and lengths, more of them than epochs. None of them is replaced,
    though those that were compared first were not too many."""
    monkeypatch.setattr(comparing, "_PIECE_BYTES", 20_000)
    fill(source, 3000)
    async with nursery_for() as nursery:
        server = await serving(nursery, source)
        rig = await relaying(nursery, tmp_path / "relay.bin", server.port)
        await rig.has(3000)
        await rig.stop()
        with DataStream.open(tmp_path / "relay.bin", index="memory") as stream:
            stream.parts.relay.put_agreement(None)
            for number in (11, 12, 13, 1001):
                update(stream, number, b"n")
            kept = contents(stream)
        # One of the four may be an update of the source's that was not heard of; these are ours.
        with DataStream.open(tmp_path / "relay.bin", index="memory") as stream:
            before = Agreement(source.stream_id, source.epoch, stream.epoch, 0, 3000, 3)
            stream.parts.relay.put_agreement(before)
        again = await relaying(nursery, tmp_path / "relay.bin", server.port)
        await again.relay.until(lambda: again.relay.failure is not None)
        assert isinstance(again.relay.failure, UpstreamRewritten)
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


@pytest.mark.parametrize("count", [3000, 2991], ids=["last differs", "last is the same"])
async def test_another_history_on_another_stream_changes_nothing(
    tmp_path: Path, source: DataStream, count: int
) -> None:
    """Its entries have the types and lengths of ours, and the epochs would allow as many updates;
    it arrives in several batches."""
    fill(source, count, size=2000)
    async with nursery_for() as nursery:
        server = await serving(nursery, source)
        rig = await relaying(nursery, tmp_path / "relay.bin", server.port)
        await rig.has(count)
        for at in range(50):
            update(source, 1 + 10 * at, bytes([at]))
        await same(rig, source)
        await settled(rig, source)
        kept, epoch = contents(rig.stream), rig.stream.epoch
        assert epoch > 40
        await server.stop()
        with twin(tmp_path / "other.bin", source, 2960) as other:
            fill(other, count - 2960, salt=b"other", size=2000)
            server.stream = other
            await server.start()
            await rig.relay.until(lambda: rig.relay.failure is not None)
            assert isinstance(rig.relay.failure, UpstreamRewritten)
            assert rig.relay.failure.first_differing == 2961
            assert contents(rig.stream) == kept
            assert rig.stream.epoch == epoch
            await rig.stop()
            follows = await relaying(
                nursery, tmp_path / "relay.bin", server.port, on_rewrite="follow"
            )
            await same(follows, other)


async def test_an_update_of_a_rewritten_history_is_not_applied(
    tmp_path: Path, source: DataStream
) -> None:
    """The upstream went back, wrote another history, and updated an entry of that."""
    fill(source, 3000)
    async with nursery_for() as nursery:
        server = await serving(nursery, source)
        rig = await relaying(nursery, tmp_path / "relay.bin", server.port)
        await rig.has(3000)
        await settled(rig, source)
        await server.stop()
        kept = contents(source)
        source.truncate(1000)
        fill(source, 2000, salt=b"other")
        update(source, 1501, b"u")
        await server.start()
        await rig.relay.until(lambda: rig.relay.failure is not None)
        assert isinstance(rig.relay.failure, UpstreamRewritten)
        assert contents(rig.stream) == kept


async def test_updates_are_applied_while_hashes_are_made(
    tmp_path: Path,
    source: DataStream,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Neither side takes an update for a truncation, nor waits for a connection."""
    fill(source, 3000)
    async with nursery_for() as nursery:
        server = await serving(nursery, source)
        rig = await relaying(nursery, tmp_path / "relay.bin", server.port)
        await rig.has(3000)
        await rig.stop()
        with DataStream.open(tmp_path / "relay.bin", index="memory") as stream:
            stream.parts.relay.put_agreement(None)
        failed: list[int] = []

        async def changed(reader: Reader, before: int) -> None:
            while reader.turn < before + 2:
                await trio.sleep(0.001)

        def disturbed(reader: Reader, first: int, end: int, most_bytes: int) -> tuple[int, bytes]:
            # As where an update comes in the middle.
            if len(failed) < 3:
                before = reader.turn
                failed.append(first)
                trio.from_thread.run_sync(update, source, 1, b"%d" % len(failed))
                trio.from_thread.run(changed, reader, before)
                raise truncated_below(first)
            return hash_range(reader, first, end, most_bytes)

        monkeypatch.setattr(comparing, "hash_range", disturbed)
        rig = await relaying(nursery, tmp_path / "relay.bin", server.port)
        await same(rig, source)
        await settled(rig, source)
        assert failed == [0, 0, 0]
        assert "comparison with the upstream waits" not in caplog.text
        assert "removed by a truncation" not in caplog.text


async def test_truncations_that_concern_no_entry_are_reported(
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


# An upstream that is up to no good.

STREAM_ID = b"id of the stub 16"[:16]


class Hostile(Stub):
    """Says that it reports changes, and sends these packets to a client that follows."""

    def __init__(self, count: int, packets: bytes, reports: Reports = Reports.ALL) -> None:
        super().__init__(sample(count))
        self._packets = packets
        self._reports = reports

    def answer(self, event: Event) -> bytes:
        match event:
            case CapabilitiesQuery():
                features = Capabilities().features & ~FEATURE_PAGE_SUMS
                return OK + Capabilities(features, STREAM_ID, epoch=5).pack()
            case FollowStart(number):
                self.connection.started()
                begun = FollowBegun(self._reports, STREAM_ID, 5, 5).pack()
                total = len(self.entries)
                sent = b"".join(entry.pack() for entry in self.entries[number:])
                reported = encode_commit(total) + sent if sent else b""
                return OK + begun + reported + self._packets
        return super().answer(event)


def replaced(entry: Entry, **changed: Any) -> bytes:
    said = {"number": entry.number, "type": entry.type, "data": entry.data, **changed}
    return encode_update(6, Entry(**said).pack())


SAMPLE = sample(60)
NONSENSE = [
    pytest.param(replaced(SAMPLE[31], data=b"x" * 30), "relay's entry has type", id="length"),
    pytest.param(replaced(SAMPLE[31], type=99), "relay's entry has type", id="type"),
    pytest.param(replaced(SAMPLE[30], type=1), "relay's entry has type", id="bookmark here"),
    pytest.param(replaced(SAMPLE[30]), "an update of bookmark 30", id="bookmark there"),
    pytest.param(encode_truncation(5, 60), "to epoch 5 after epoch 5", id="epoch"),
    pytest.param(encode_truncation(6, 60) * 2, "to epoch 6 after epoch 6", id="epoch again"),
    pytest.param(encode_truncation(6, 30), "truncated its stream to 30 entries", id="truncation"),
    pytest.param(b"\xf6" + bytes(40), "a change of 0 bytes", id="zeros"),
    pytest.param(b"\xf6" + b"\xff" * 40, "a change of 4294967295 bytes", id="ones"),
]


@pytest.mark.parametrize("packets, words", NONSENSE)
async def test_reports_that_make_no_sense(
    tmp_path: Path, packets: bytes, words: str, caplog: pytest.LogCaptureFixture
) -> None:
    """One line says what is wrong, and nothing here has changed."""
    plan = [(functools.partial(Hostile, 60, packets), NONE)] * 40
    with FaultyServer(*plan) as server:
        async with nursery_for() as nursery:
            rig = await relaying(nursery, tmp_path / "relay.bin", server.port, look_seconds=1000)
            await rig.relay.until(lambda: words in rig.download.states[0].lost or has_failed(rig))
            said = str(rig.relay.failure or rig.download.states[0].lost)
            assert words in said
            assert "\n" not in said
            assert list(rig.stream.entries()) == SAMPLE
            assert sum(words in record.getMessage() for record in caplog.records) in (1, 2)
            await rig.stop()


def has_failed(rig: Rig) -> bool:
    return rig.relay.failure is not None


async def test_reports_about_entries_that_are_not_here(tmp_path: Path) -> None:
    """They may be on their way."""
    far = encode_update(6, Entry(60, 1, b"x").pack())
    far += encode_update(7, Entry((1 << 64) - 3, 1, b"x").pack())
    far += replaced(SAMPLE[31], data=b"!" * 31).replace(bytes([6]), bytes([8]), 1)
    with FaultyServer(*[(functools.partial(Hostile, 60, far), NONE)] * 10) as server:
        async with nursery_for() as nursery:
            rig = await relaying(nursery, tmp_path / "relay.bin", server.port, look_seconds=1000)
            await rig.relay.until(lambda: rig.download.updates > 0)
            expected = [*SAMPLE]
            expected[31] = Entry(31, SAMPLE[31].type, b"!" * 31)
            assert list(rig.stream.entries()) == expected
            assert rig.download.states[0].lost == ""
            await rig.stop()


async def test_updates_wait_for_the_end_of_an_operation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also of entries of that operation, and not for ever."""
    more = sample(70)
    updates = b"".join(
        encode_update(6 + at, Entry(number, more[number].type, b"!" * number).pack())
        for at, number in enumerate([1, 2, 63, 65, 64])
    )
    half = encode_commit(70) + b"".join(entry.pack() for entry in more[60:66])
    rest = b"".join(entry.pack() for entry in more[66:])
    with FaultyServer(*[(functools.partial(Hostile, 60, half + updates + rest), NONE)] * 9) as it:
        async with nursery_for() as nursery:
            rig = await relaying(nursery, tmp_path / "relay.bin", it.port, look_seconds=1000)
            await rig.relay.until(lambda: rig.download.updates == 5)
            expected = [
                Entry(n, more[n].type, b"!" * n) if n in (1, 2, 63, 64, 65) else more[n]
                for n in range(70)
            ]
            assert list(rig.stream.entries()) == expected
            await rig.stop()
    # With a long operation this many updates do not wait.
    monkeypatch.setattr(apply_changes, "MAX_WAITING_BYTES", 100)
    with FaultyServer(*[(functools.partial(Hostile, 60, half + updates), NONE)] * 9) as it:
        async with nursery_for() as nursery:
            rig = await relaying(nursery, tmp_path / "other.bin", it.port, look_seconds=1000)
            words = "updated too many entries within one operation"
            await rig.relay.until(lambda: words in rig.download.states[0].lost)
            assert list(rig.stream.entries()) == SAMPLE
            await rig.stop()
