"""Sources that send only some entries: where they are, and what is remembered of them."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from datastreamer.consumer.options import ReassemblyOptions
from datastreamer.consumer.sqlite_store import SqliteStore
from datastreamer.consumer.state import SourceRolledBack
from datastreamer.errors import UsageError
from datastreamer.protocol.retry import Backoff
from datastreamer.reassembly import Splitter
from datastreamer.reassembly.progress import SourceProgress
from datastreamer.selection.clauses import selected
from datastreamer.storage.stream import DataStream
from tests.consumer.test_reassemble import Served, collected, ids, put, streams, way
from tests.network.fixtures import append
from tests.network.network import messages_of, own

__all__ = ["streams", "way"]

MESSAGE = 0x10
SOON = Backoff(0.001, 0.002)
NOISE = [(1, b"no message")] * 50


def filter_by(monkeypatch: pytest.MonkeyPatch, types: list[int] | None) -> None:
    """Have servers send the entries of these types alone."""
    where = selected(types)
    monkeypatch.setattr(ReassemblyOptions, "where", property(lambda _: where))


def place_in(path: Path) -> SourceProgress:
    with SqliteStore(path) as store:
        progress = store.load()
    assert progress is not None
    return progress.places["a"]


@pytest.mark.parametrize("types", [None, [MESSAGE]], ids=["all", "filtered"])
async def test_batches_without_messages_move_the_place(
    types: list[int] | None,
    streams: list[DataStream],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    filter_by(monkeypatch, types)
    stream, path = streams[0], tmp_path / "db"
    put(stream, *messages_of(1))
    async with Served(streams[:1]) as served:
        for number in (1, 2, 3):
            append(stream, *NOISE)
            with SqliteStore(path) as store:
                found = await collected(served.upstreams, store=store)
            assert ids(found) == [1][: 2 - number]
            place = place_in(path)
            assert place.position == place.seen == place.read.next_entry == 4 + 50 * number
            assert (place.read.chosen is None) == (types is None)
        put(stream, *messages_of(2))
        with SqliteStore(path) as store:
            assert ids(await collected(served.upstreams, store=store)) == [2]


@pytest.mark.parametrize("later", ["all", "filtered", "other types", "file"])
@pytest.mark.parametrize("before", ["all", "filtered"])
async def test_a_place_of_another_selection_is_compared(
    before: str,
    later: str,
    streams: list[DataStream],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also where entries before it are read again, because a payload is not complete."""
    chosen = {"all": None, "filtered": [MESSAGE], "other types": [1, MESSAGE], "file": None}
    stream, path = streams[0], tmp_path / "db"
    append(stream, *NOISE * 8)
    put(stream, *messages_of(1), *messages_of(2)[:2], *messages_of(3))
    append(stream, *NOISE)
    put(stream, *messages_of(4)[:1])
    append(stream, *NOISE)

    async def read(selection: str) -> tuple[list[int], list[Any]]:
        filter_by(monkeypatch, chosen[selection])
        reported: list[Any] = []
        async with Served([stream]) as served:
            upstreams: Any = served.upstreams
            if selection == "file":
                upstreams = {"a": Path(stream.path)}
                stream.sync()
            with SqliteStore(path) as store:
                found = await collected(upstreams, store=store, on_event=reported.append)
        return ids(found), reported

    assert await read(before) == ([1, 3], [])
    assert place_in(path).position == 404
    # All that is remembered is there.
    put(stream, *messages_of(2)[2:3])
    assert await read(later) == ([], [])
    assert place_in(path).read.next_entry == stream.total_entries == 512
    assert await read(before) == ([], [])
    # The last message is another, and so are the entries before it.
    stream.truncate(461)
    append(stream, *[(2, b"something else")] * 60)
    put(stream, *messages_of(2)[2:], *messages_of(5))
    found, [rolled_back] = await read(later)
    assert found == [2, 5]
    assert isinstance(rolled_back, SourceRolledBack)
    assert rolled_back.rollback.to_entry == (461 if before == "all" else 511)
    assert rolled_back.rollback.from_entry == 512


async def test_a_store_has_a_subscription(streams: list[DataStream], tmp_path: Path) -> None:
    """To less may be subscribed later; not to more, whose parts have been passed."""
    stream, path = streams[0], tmp_path / "db"

    async def read(number: int, subscribe: list[bytes] | None) -> list[bytes]:
        prefixes = [bytes([kind]) + own(number) for kind in (1, 2)]
        parts: dict[bytes, Any] = {prefix: [(b"", prefix[:1])] for prefix in prefixes}
        put(stream, *Splitter().split(own(number), parts))
        async with Served([stream]) as served:
            with SqliteStore(path) as store:
                found = await collected(served.upstreams, subscribe=subscribe, store=store)
        assert ids(found) == [number]
        return [key[:1] for key, _ in found[0].parts]

    assert await read(1, None) == [b"\1", b"\2"]
    assert await read(2, [b"\2", b"\1"]) == [b"\1", b"\2"]
    assert await read(3, [b"\1", b"\2", b"\1" + own(3)]) == [b"\1", b"\2"]
    expected = "a subscription to 0x01, 0x02, and parts of everything before its positions"
    with pytest.raises(UsageError, match=expected):
        await read(4, None)
    stream.truncate(stream.total_entries - 3)
    assert await read(4, [b"\2"]) == [b"\2"]
    with pytest.raises(UsageError, match="to 0x02, and parts of 0x01 before its positions"):
        await read(5, [b"\1", b"\2"])
    stream.truncate(stream.total_entries - 3)
    # As an earlier version left it.
    with closing(sqlite3.connect(path)) as database:
        database.execute("DROP TABLE reassembly_subscription")
        database.commit()
    assert await read(5, [b"\1"]) == [b"\1"]
    with pytest.raises(UsageError, match="to 0x01, and parts of 0x02"):
        await read(6, [b"\2"])
    stream.truncate(stream.total_entries - 3)
    assert await read(6, []) == []
    with pytest.raises(UsageError, match="to nothing, and parts of 0x01"):
        await read(7, [b"\1"])
