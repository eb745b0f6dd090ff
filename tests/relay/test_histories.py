"""A relay whose upstreams go back, are rewritten, or differ from each other."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
import trio
import trio.testing

from datastreamer.client.trio_driver import connect
from datastreamer.errors import (
    HistoryChanged,
    UpstreamMismatch,
    UpstreamRewritten,
    UpstreamShorter,
)
from datastreamer.relay.relay import Relay
from datastreamer.storage.stream import DataStream
from tests.relay.relaying import (
    contents,
    fill,
    new,
    nursery_for,
    relaying,
    serving,
    twin,
)


@pytest.fixture
def upstream(tmp_path: Path) -> Iterator[DataStream]:
    with new(tmp_path / "upstream.bin") as made:
        yield made


# Upstreams that change.


async def test_stops_where_the_upstream_was_truncated(
    tmp_path: Path, upstream: DataStream, caplog: pytest.LogCaptureFixture
) -> None:
    fill(upstream, 100)
    async with nursery_for() as nursery:
        server = await serving(nursery, upstream)
        relay = await relaying(nursery, tmp_path / "relay.bin", server.port)
        await relay.has(100)
        upstream.truncate(60)
        await relay.relay.until(lambda: relay.relay.failure is not None)
        assert isinstance(relay.relay.failure, UpstreamShorter)
        assert "holds only 60 entries; entries 60 to 99" in str(relay.relay.failure)
        fill(upstream, 100, salt=b"other")
        await relay.has(100)
        assert relay.stream.total_entries == 100
    assert "the download has stopped, 100 entries are still served" in caplog.text


async def test_stops_where_the_upstream_was_rewritten(tmp_path: Path, upstream: DataStream) -> None:
    fill(upstream, 100)
    async with nursery_for() as nursery:
        server = await serving(nursery, upstream)
        relay = await relaying(nursery, tmp_path / "relay.bin", server.port)
        await relay.has(100)
        await relay.stop()
        before = contents(relay_file := DataStream.open(tmp_path / "relay.bin", index="memory"))
        relay_file.close()
        upstream.truncate(99)
        fill(upstream, 10, salt=b"other")
        again = await relaying(nursery, tmp_path / "relay.bin", server.port)
        await again.relay.until(lambda: again.relay.failure is not None)
        assert isinstance(again.relay.failure, UpstreamRewritten)
        assert again.relay.failure.first_differing == 99
        assert "; --on-rewrite follow (on_rewrite=" in str(again.relay.failure)
        # The reason that /readyz answers.
        assert "--on-rewrite follow" in again.relay._unready()
        assert contents(again.stream) == before


@pytest.mark.parametrize("back_to", [0, 1, 40, 900, 999])
@pytest.mark.parametrize("more", [0, 5, 700, 2000])
async def test_follows_the_upstream_back(
    tmp_path: Path, upstream: DataStream, back_to: int, more: int
) -> None:
    fill(upstream, 1000)
    async with nursery_for() as nursery:
        server = await serving(nursery, upstream)
        relay = await relaying(nursery, tmp_path / "r.bin", server.port, on_rewrite="follow")
        await relay.has(1000)
        await server.stop()
        upstream.truncate(back_to)
        if more:
            fill(upstream, more, salt=b"other")
        await server.start()
        await relay.relay.until(lambda: relay.stream.total_entries == upstream.total_entries)
        fill(upstream, 10)
        await relay.has(upstream.total_entries)
        assert contents(relay.stream) == contents(upstream)
        assert relay.relay.failure is None


async def test_entries_that_happen_to_be_the_same_do_not_mislead(
    tmp_path: Path, upstream: DataStream
) -> None:
    """Far behind the difference every second run of entries is the same again."""
    with new(tmp_path / "relay.bin") as ours:
        fill(ours, 200)
        for part in range(20):
            fill(ours, 100, salt=b"ours" if part % 2 else b"")
    fill(upstream, 200)
    for part in range(20):
        fill(upstream, 100, salt=b"theirs" if part % 2 else b"")
    async with nursery_for() as nursery:
        server = await serving(nursery, upstream)
        relay = await relaying(nursery, tmp_path / "relay.bin", server.port, on_rewrite="follow")
        await relay.relay.until(lambda: relay.stream.total_entries <= 301)
        fill(upstream, 10)
        await relay.relay.until(lambda: relay.stream.total_entries == 2210)
        assert contents(relay.stream) == contents(upstream)


async def test_a_client_is_ended_by_a_relay_that_goes_back(
    tmp_path: Path, upstream: DataStream
) -> None:
    fill(upstream, 100)
    async with nursery_for() as nursery:
        server = await serving(nursery, upstream)
        relay = await relaying(nursery, tmp_path / "r.bin", server.port, on_rewrite="follow")
        await relay.has(100)
        async with connect("127.0.0.1", relay.port) as client, client.entries() as entries:
            for _ in range(100):
                await entries.__anext__()
            upstream.truncate(51)
            fill(upstream, 10, salt=b"other")
            with pytest.raises(HistoryChanged) as caught:
                await entries.__anext__()
            # Entry 50 is the same, but for a moment the relay may end before it.
            assert caught.value.first_differing in (50, 51)


async def test_another_stream_is_never_followed(tmp_path: Path, upstream: DataStream) -> None:
    fill(upstream, 100)
    with new(tmp_path / "relay.bin", system_id=138) as ours:
        fill(ours, 10)
    async with nursery_for() as nursery:
        server = await serving(nursery, upstream)
        relay = await relaying(nursery, tmp_path / "relay.bin", server.port, on_rewrite="follow")
        await relay.relay.until(lambda: relay.relay.failure is not None)
        assert isinstance(relay.relay.failure, UpstreamMismatch)
        assert "system id 137" in str(relay.relay.failure)
        assert relay.stream.total_entries == 10
        await relay.has(10)


# More than one upstream.


async def test_fails_over_and_goes_back(
    tmp_path: Path, upstream: DataStream, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    fill(upstream, 100)
    with twin(tmp_path / "second.bin", upstream, 100) as second:
        fill(second, 20)
        async with nursery_for() as nursery:
            one, two = await serving(nursery, upstream), await serving(nursery, second)
            relay = await relaying(nursery, tmp_path / "relay.bin", one.port, two.port)
            await relay.has(100)
            await one.stop()
            await relay.has(120)
            assert relay.download.current is relay.download.states[1]
            # There again, but with less than we have: that is no reason to go back.
            await one.start()
            await relay.relay.until(lambda: relay.download.states[0].entries == 100)
            assert relay.download.current is relay.download.states[1]
            await relay.relay.until(lambda: relay.download.states[0].reported_shorter)
            assert "holds only 100 entries: entries 100 to 119 are in doubt" in caplog.text
            fill(upstream, 30)
            await relay.relay.until(lambda: relay.download.current is relay.download.states[0])
            await relay.has(130)
            assert contents(relay.stream) == contents(upstream)
    assert "is reachable again, returning to it" in caplog.text


async def test_waits_for_an_upstream_that_is_merely_behind(
    tmp_path: Path, upstream: DataStream, caplog: pytest.LogCaptureFixture
) -> None:
    fill(upstream, 100)
    with twin(tmp_path / "second.bin", upstream, 90) as second:
        async with nursery_for() as nursery:
            one, two = await serving(nursery, upstream), await serving(nursery, second)
            relay = await relaying(
                nursery, tmp_path / "relay.bin", one.port, two.port, on_rewrite="follow"
            )
            await relay.has(100)
            await one.stop()
            await relay.relay.until(lambda: relay.download.states[1].shorter_since is not None)
            assert relay.stream.total_entries == 100
            with second.atomic_op() as op:
                for batch in upstream.batches(90):
                    op.add_batch(batch)
            fill(second, 5)
            await relay.has(105)
            assert contents(relay.stream) == contents(second)
    assert "entries 90 to 99 of this relay are in doubt" in caplog.text


async def test_follows_one_that_stays_behind_when_patience_ends(
    tmp_path: Path, upstream: DataStream
) -> None:
    fill(upstream, 100)
    with twin(tmp_path / "second.bin", upstream, 90) as second:
        async with nursery_for() as nursery:
            one, two = await serving(nursery, upstream), await serving(nursery, second)
            relay = await relaying(
                nursery,
                tmp_path / "relay.bin",
                one.port,
                two.port,
                on_rewrite="follow",
                patience=0.05,
            )
            await relay.has(100)
            await one.stop()
            await relay.relay.until(lambda: relay.stream.total_entries == 90)
            assert contents(relay.stream) == contents(second)


async def test_patience_with_one_that_is_behind_begins_anew(
    tmp_path: Path, upstream: DataStream, autojump_clock: trio.testing.MockClock
) -> None:
    """Whenever it has got more, and whenever another could be had meanwhile."""
    relay = Relay([("first", 1), ("second", 2)], tmp_path / "relay.bin", on_rewrite="follow")
    download = relay.download
    download.stream = upstream
    first, second = download.states

    def followed(total: int) -> bool:
        return download._is_followed(second, UpstreamShorter(f"it holds {total}", total))

    assert not followed(10)
    for total in range(11, 20):
        await trio.sleep(29)
        assert not followed(total)
    download._joined(first, upstream, upstream.header)
    await trio.sleep(3600)
    assert not followed(19)
    await trio.sleep(29)
    assert not followed(19)
    await trio.sleep(2)
    assert followed(19)


async def test_another_stream_on_the_second_upstream(tmp_path: Path, upstream: DataStream) -> None:
    fill(upstream, 100)
    with new(tmp_path / "second.bin", system_id=9) as second:
        fill(second, 500)
        async with nursery_for() as nursery:
            one, two = await serving(nursery, upstream), await serving(nursery, second)
            relay = await relaying(nursery, tmp_path / "relay.bin", one.port, two.port)
            await relay.has(100)
            await one.stop()
            await relay.relay.until(lambda: relay.download.states[1].set_aside is not None)
            assert relay.relay.failure is None
            fill(upstream, 1)
            await one.start()
            await relay.has(101)
            assert contents(relay.stream) == contents(upstream)


async def test_another_history_on_the_second_upstream(tmp_path: Path, upstream: DataStream) -> None:
    fill(upstream, 100)
    with twin(tmp_path / "second.bin", upstream, 95) as second:
        fill(second, 50, salt=b"other")
        async with nursery_for() as nursery:
            one, two = await serving(nursery, upstream), await serving(nursery, second)
            relay = await relaying(nursery, tmp_path / "relay.bin", one.port, two.port)
            await relay.has(100)
            await one.stop()
            await relay.relay.until(lambda: relay.download.states[1].set_aside is not None)
            assert isinstance(relay.download.states[1].set_aside, UpstreamRewritten)
            assert relay.stream.total_entries == 100


async def test_an_upstream_that_was_set_aside_is_used_again_once_it_agrees(
    tmp_path: Path, upstream: DataStream, caplog: pytest.LogCaptureFixture
) -> None:
    """Also the only one left. Until then nothing is logged again."""
    fill(upstream, 1000)
    with twin(tmp_path / "second.bin", upstream, 501) as second:
        fill(second, 1, salt=b"other")
        fill(second, 498)
        async with nursery_for() as nursery:
            one, two = await serving(nursery, upstream), await serving(nursery, second)
            relay = await relaying(nursery, tmp_path / "relay.bin", one.port, two.port)
            first, later = relay.download.states
            await relay.has(1000)
            await one.stop()
            # Its last entries are the same: hashes show that an older one differs.
            await relay.relay.until(lambda: later.set_aside is not None)
            upstream.truncate(990)
            await one.start()
            await relay.relay.until(lambda: relay.relay.failure is not None)
            before = two.server.counts.accepted, len(caplog.records)
            while two.server.counts.accepted < before[0] + 3:
                await trio.sleep(0.01)
            assert isinstance(later.set_aside, UpstreamRewritten)
            assert len(caplog.records) == before[1]
            second.truncate(501)
            fill(second, 509)
            await relay.has(1010)
            assert (relay.relay.failure, later.set_aside) == (None, None)
            assert isinstance(first.set_aside, UpstreamShorter)
            fill(upstream, 20)
            await relay.relay.until(lambda: relay.download.current is first)
            await relay.has(1010)
    again = [each for each in caplog.messages if each.endswith(", and is used again")]
    assert [each.split()[0] for each in again] == [f"127.0.0.1:{two.port}", f"127.0.0.1:{one.port}"]


async def test_a_long_block_that_was_replaced_is_distinguished_from_the_old_one(
    tmp_path: Path, upstream: DataStream
) -> None:
    """It differs in its first entry; the 600 behind are the same, as transactions may be."""

    def block(stream: DataStream, number: int, first: bytes) -> None:
        with stream.atomic_op() as op:
            op.add_bookmark(b"%d" % number)
            op.add_entry(2, first)
            op.add_entries(3, [b"transaction %d" % at for at in range(600)])

    for number in range(4):
        block(upstream, number, b"block")
    with twin(tmp_path / "relay.bin", upstream, 3 * 602):
        pass
    with DataStream.open(tmp_path / "relay.bin", index="memory") as ours:
        block(ours, 3, b"another block")
        block(ours, 4, b"block")
    block(upstream, 4, b"block")
    async with nursery_for() as nursery:
        server = await serving(nursery, upstream)
        relay = await relaying(nursery, tmp_path / "relay.bin", server.port)
        await relay.relay.until(lambda: relay.relay.failure is not None)
        assert isinstance(relay.relay.failure, UpstreamRewritten)
        assert relay.relay.failure.first_differing == 3 * 602 + 1
        assert f"its entry {3 * 602 + 1} differs" in str(relay.relay.failure)


@pytest.mark.parametrize("size", [10, 100_000])
async def test_without_bookmarks_it_ends_to_look_back(
    tmp_path: Path, upstream: DataStream, size: int
) -> None:
    with upstream.atomic_op() as op:
        op.add_entries(1, [number.to_bytes(4, "big").ljust(size) for number in range(600)])
    with twin(tmp_path / "relay.bin", upstream, 500):
        pass
    async with nursery_for() as nursery:
        server = await serving(nursery, upstream)
        relay = await relaying(nursery, tmp_path / "relay.bin", server.port)
        await relay.has(600)
        assert contents(relay.stream) == contents(upstream)


async def test_two_with_different_histories_are_not_followed_alternately(
    tmp_path: Path, upstream: DataStream, caplog: pytest.LogCaptureFixture
) -> None:
    fill(upstream, 100)
    with twin(tmp_path / "second.bin", upstream, 95) as second:
        fill(second, 50, salt=b"other")
        async with nursery_for() as nursery:
            one, two = await serving(nursery, upstream), await serving(nursery, second)
            relay = await relaying(
                nursery, tmp_path / "relay.bin", one.port, two.port, on_rewrite="follow"
            )
            first, later = relay.download.states
            await relay.has(100)
            await one.stop()
            # Its turn comes, and there is no reason not to believe it.
            await relay.relay.until(lambda: relay.stream.total_entries == 145)
            assert contents(relay.stream) == contents(second)
            fill(upstream, 80)
            await one.start()
            await relay.relay.until(lambda: relay.download.current is first)
            await relay.relay.until(lambda: relay.stream.total_entries == 180)
            assert contents(relay.stream) == contents(upstream)
            assert later.distrusted
            await one.stop()
            await relay.relay.until(lambda: later.set_aside is not None)
            assert relay.stream.total_entries == 180
            assert relay.relay.failure is None
            await one.start()
            fill(upstream, 5)
            await relay.relay.until(lambda: relay.stream.total_entries == 185)
            assert contents(relay.stream) == contents(upstream)
    assert "is not followed again" in caplog.text
