"""How damage of a relay's file is noticed, and what is known after a page was restored."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import trio

from datastreamer.client.upstream import Upstream
from datastreamer.errors import (
    ConnectionLost,
    DamagedEntry,
    DamagedPage,
    EntriesDamaged,
    StreamFileError,
)
from datastreamer.protocol.following import RangeHash
from datastreamer.relay import upstreams
from datastreamer.relay.apply_changes import known_agreement
from datastreamer.relay.client import RelayClient, client_of
from datastreamer.relay.compare import Connect
from datastreamer.relay.damaged_pages import restore_pages
from datastreamer.relay.joining import join
from datastreamer.relay.truncation_point import truncate_file
from datastreamer.relay.upstreams import Download
from datastreamer.storage.header.records import Agreement
from datastreamer.storage.maintain.check import verify
from datastreamer.storage.stream import DataStream
from tests.relay.relaying import (
    Rig,
    Running,
    contents,
    fill,
    new,
    nursery_for,
    packed,
    relaying,
    serving,
    twin,
)
from tests.storage.made import FIRST, PAGE

pytestmark = pytest.mark.usefixtures("no_times")


@pytest.fixture
def source(tmp_path: Path) -> Iterator[DataStream]:
    """Of three whole pages, and one more; the last 256 entries are in two of them."""
    with new(tmp_path / "source.bin") as made:
        while made.header.total_length < FIRST + 3 * PAGE + 100_000:
            fill(made, 10, size=2000)
        yield made


def update(stream: DataStream, number: int) -> int:
    """Update an entry at or after this one; returns its number."""
    entry = stream.entry(number)
    if entry.is_bookmark:
        entry = stream.entry(number + 1)
    stream.update_entry(entry.number, entry.type, b"u" * len(entry.data))
    return entry.number


def overwrite(stream: DataStream, number: int, at: int, data: bytes = b"!") -> None:
    """Bytes of an entry, in the page cache: no read is compared with a checksum."""
    fd = os.open(stream.path, os.O_WRONLY)
    os.pwrite(fd, data, stream.reader.cursor(number).offset + at)
    os.close(fd)


async def end(rig: Rig, source: DataStream) -> None:
    fill(source, 10)
    await rig.relay.until(
        lambda: (
            rig.relay.caught_up
            and rig.stream.total_entries == source.total_entries
            and not rig.download.uncompared
            and packed(rig.stream) == packed(source)
        )
    )
    assert rig.relay.failure is None
    await rig.stop()
    assert verify(rig.relay.path).problems == []


async def until_restored(rig: Rig) -> None:
    await rig.relay.until(lambda: rig.download.counts.healed_pages > 0 and rig.relay.caught_up)


async def test_among_the_last_entries(tmp_path: Path, source: DataStream) -> None:
    """They are compared at a new connection."""
    async with nursery_for() as nursery:
        server = await serving(nursery, source)
        rig = await relaying(nursery, tmp_path / "relay.bin", server.port)
        await rig.has(source.total_entries)
        await server.stop()
        number = source.reader.first_number(3) - 5
        assert source.total_entries - 256 < number
        overwrite(rig.stream, number, 20)
        await server.start()
        await until_restored(rig)
        await end(rig, source)


async def test_an_entry_that_is_updated(tmp_path: Path, source: DataStream) -> None:
    """Its type is another one here, which an update keeps."""
    async with nursery_for() as nursery:
        server = await serving(nursery, source)
        rig = await relaying(nursery, tmp_path / "relay.bin", server.port)
        await rig.has(source.total_entries)
        number = source.reader.first_number(1) + 5
        overwrite(rig.stream, number, 8)
        update(source, number)
        await until_restored(rig)
        await end(rig, source)


async def test_older_entries(tmp_path: Path, source: DataStream) -> None:
    """They are compared by hashes, since the upstream does not know what it has changed."""
    async with nursery_for() as nursery:
        server = await serving(nursery, source)
        rig = await relaying(nursery, tmp_path / "relay.bin", server.port)
        await rig.has(source.total_entries)
        rig.stream.parts.relay.put_agreement(None)
        overwrite(rig.stream, 15, 8)
        await server.stop()
        await server.start()
        await until_restored(rig)
        await end(rig, source)


async def test_the_last_page_is_restored_before_any_change(
    tmp_path: Path, source: DataStream
) -> None:
    async with nursery_for() as nursery:
        server = await serving(nursery, source)
        with twin(tmp_path / "relay.bin", source, source.total_entries) as relay:
            agreement = Agreement(source.stream_id, source.epoch, relay.epoch, 0, 0, 0)
            relay.parts.relay.put_agreement(agreement)
            overwrite(relay, relay.total_entries - 5, 20)
            update(source, 5)
            async with connecting(relay, server)() as client:
                with pytest.raises(DamagedPage):
                    await join(client, relay, 5)
            assert relay.epoch == 0


def connecting(stream: DataStream, server: Running) -> Connect:
    upstream = Upstream("127.0.0.1", server.port)
    return partial(client_of, upstream, stream.header.stream_type, 5.0, None, ())


@pytest.mark.parametrize("updated", [False, True])
async def test_from_an_upstream_that_does_not_lag(
    tmp_path: Path, source: DataStream, updated: bool
) -> None:
    """The first one lacks some entries of the page."""
    total = source.total_entries
    with (
        twin(tmp_path / "first.bin", source, total - 10) as first,
        twin(tmp_path / "relay.bin", source, total) as relay,
    ):
        overwrite(relay, total - 20, 20)
        if updated:
            update(source, total - 30)
            agreement = Agreement(source.stream_id, 0, relay.epoch, 0, 0, 0)
            relay.parts.relay.put_agreement(agreement)
        relay.close()
        async with nursery_for() as nursery:
            one, two = await serving(nursery, first), await serving(nursery, source)
            rig = await relaying(
                nursery, tmp_path / "relay.bin", one.port, two.port, look_seconds=1000
            )
            await end(rig, source)


@pytest.mark.parametrize("same", [True, False], ids=["same stream", "another stream"])
async def test_what_the_file_agrees_with(tmp_path: Path, source: DataStream, same: bool) -> None:
    """After a page was replaced: it does so as before if its entries come from that stream."""
    async with nursery_for() as nursery:
        with twin(tmp_path / "relay.bin", source, source.total_entries) as relay:
            known = source.stream_id if same else bytes(range(16))
            relay.parts.relay.put_agreement(Agreement(known, 0, 0, 0, 0, 0))
            number = source.reader.first_number(1)
            overwrite(relay, number + 5, 20)
            updated = update(source, number + 50)
            server = await serving(nursery, source)
            damage = DamagedEntry(relay.path, FIRST + PAGE, "")
            connect = connecting(relay, server)
            assert await restore_pages(connect, relay, damage, 5) == 1
            assert contents(relay) == contents(source)
            assert relay.entry(updated) == source.entry(updated)
            agreement = known_agreement(relay)
            assert (agreement is not None) == same
            assert agreement is None or (agreement.stream_id, agreement.epoch) == (known, 0)
            with pytest.raises(StreamFileError):
                await restore_pages(connect, relay, damage, 5)


async def test_nothing_is_compared_again(
    tmp_path: Path, source: DataStream, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    async with nursery_for() as nursery:
        server = await serving(nursery, source)
        rig = await relaying(nursery, tmp_path / "relay.bin", server.port)
        await rig.has(source.total_entries)
        overwrite(rig.stream, 5, 20)
        update(source, 55)
        await until_restored(rig)
        await end(rig, source)
    assert "replaced by these entries" in caplog.text
    assert "comparing entries" not in caplog.text


async def test_what_arrives_is_compared_first(
    tmp_path: Path, source: DataStream, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with nursery_for() as nursery:
        with twin(tmp_path / "relay.bin", source, source.total_entries) as relay:
            server = await serving(nursery, source)
            connect = connecting(relay, server)
            update(source, 50)
            overwrite(relay, 5, 20)
            damage = DamagedEntry(relay.path, FIRST, "")
            kept = contents(relay)
            # Damage in the upstream's memory, which is sent and shows in no checksum but its own.
            overwrite(source, 25, 20)
            with pytest.raises(EntriesDamaged):
                await restore_pages(connect, relay, damage, 5)
            overwrite(source, 25, 20, source_byte(relay, 25))

            async def changed(client: RelayClient, first: int, stop: int) -> RangeHash:
                return RangeHash(first, stop, 1, bytes(16))

            with monkeypatch.context() as patch:
                patch.setattr(RelayClient, "range_hash", changed)
                with pytest.raises(ConnectionLost, match="has changed entries 0 to "):
                    await restore_pages(connect, relay, damage, 5)
            assert contents(relay) == kept
            assert relay.epoch == 0
            await restore_pages(connect, relay, damage, 5)
            assert contents(relay) == contents(source)


def source_byte(stream: DataStream, number: int) -> bytes:
    return stream.reader.packed(number)[20:21]


async def test_damage_that_remains_is_not_met_all_the_time(
    tmp_path: Path, source: DataStream, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There is a pause after each attempt."""
    async with nursery_for() as nursery:
        server = await serving(nursery, source)
        rig = await relaying(nursery, tmp_path / "relay.bin", server.port)
        await rig.has(source.total_entries)

        async def restores_nothing(*_: object) -> int:
            return 0

        paused, pause = trio.Event(), Download._pause

        async def noted(self: Download, attempt: int, what: str) -> None:
            paused.set()
            await pause(self, attempt, what)

        monkeypatch.setattr(upstreams, "restore_pages", restores_nothing)
        monkeypatch.setattr(Download, "_pause", noted)
        overwrite(rig.stream, source.total_entries - 5, 20)
        update(source, source.total_entries - 20)
        await paused.wait()
        monkeypatch.undo()
        await end(rig, source)


def test_a_truncation_past_damage(tmp_path: Path, source: DataStream) -> None:
    """A page that can be restored is kept, nothing of another one is."""
    with twin(tmp_path / "relay.bin", source, source.total_entries) as relay:
        first, second = relay.reader.first_number(1), relay.reader.first_number(2)
        overwrite(relay, first + 5, 20)
        with pytest.raises(DamagedPage):
            truncate_file(relay, second, [], boundary=True)
        assert relay.total_entries == source.total_entries
        commits = [first - 20, second]
        assert truncate_file(relay, second - 20, commits, boundary=True) == first - 20
        assert commits == [first - 20]
        assert contents(relay) == contents(source)[: first - 20]
    assert verify(relay.path).problems == []
