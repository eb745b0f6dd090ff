"""/v1/search: by hash and address, while the index is built, after truncations and damage."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import trio

from datastreamer.cli.demo import DemoSequencer
from datastreamer.format import page_start
from datastreamer.http.answers.hash_index import SUFFIX, HashIndex, IndexState, names_of
from datastreamer.storage.stream import DataStream
from datastreamer.zkevm.decoding import decode
from tests.http.asking import ask
from tests.http.serving import Web, serving
from tests.network.fixtures import append

# Fills nearly a page, and is no event.
LARGE = (99, bytes(1_000_000))


@pytest.fixture(params=[1, 3])
def filled(path: Path, request: pytest.FixtureRequest) -> Iterator[DataStream]:
    with DataStream.create(path, version=request.param, sync="os", index="memory") as stream:
        write(stream, 40)
        yield stream


def write(stream: DataStream, blocks: int, seed: int = 0) -> None:
    sequencer = DemoSequencer(stream, seed=seed)
    for _ in range(blocks):
        sequencer.write()


def expected(stream: DataStream) -> dict[bytes, list[int]]:
    """The entries, newest first, that each hash and address leads to."""
    found = defaultdict(list)
    for entry in stream.entries():
        if entry.type == LARGE[0]:
            continue
        for name in names_of(decode(entry, version=stream.header.version)):
            found[name].insert(0, entry.number)
    return found


async def search(web: Web, name: bytes, query: str = "") -> Any:
    code, _, body = await ask(web.port, f"/v1/search/0x{name.hex()}{query}")
    assert code == 200, body
    return json.loads(body)


async def indexed(web: Web) -> Any:
    """The last answer, once all entries were searched."""
    while True:
        found = await search(web, bytes(32))
        if found["complete"]:
            assert found["searched_entries"] == found["total_entries"]
            assert (found["unread_entries"], found["trouble"]) == (0, "")
            return found
        assert found["searched_entries"] < found["total_entries"] or found["unread_entries"]
        await trio.sleep(0.02)


async def check(web: Web, stream: DataStream) -> None:
    await indexed(web)
    for name, entries in list(expected(stream).items())[-60:]:
        rows = (await search(web, name, "?limit=100"))["found"]
        assert [row["entry"] for row in rows] == entries[:100], name.hex()


async def test_hashes_and_addresses_lead_to_their_entries(filled: DataStream) -> None:
    async with serving(filled) as web:
        await check(web, filled)
        assert (await search(web, b"\1" * 32))["found"] == []


async def test_an_address_has_pages_of_transactions(filled: DataStream) -> None:
    known = expected(filled)
    address = next(name for name in known if len(name) == 20)
    entry = filled.reader.entry(known[address][0])
    for _ in range(4):
        append(filled, (entry.type, entry.data))
    async with serving(filled) as web:
        await indexed(web)
        first = await search(web, address, "?limit=2")
        more = await search(web, address, f"?limit=9&before={first['before']}")
        assert more["before"] is None
        found = [row["entry"] for row in first["found"] + more["found"]]
        assert found == expected(filled)[address]
        assert len(found) >= 5


async def test_a_truncation_and_what_follows_it(filled: DataStream) -> None:
    async with serving(filled, explorer=True) as web:
        await check(web, filled)
        gone = set(expected(filled))
        filled.truncate(filled.total_entries // 2)
        gone -= set(expected(filled))
        write(filled, 20, seed=1)
        await check(web, filled)
        for name in gone - set(expected(filled)):
            assert (await search(web, name))["found"] == []
    # Also one that happens while nobody serves.
    filled.truncate(filled.total_entries // 2)
    write(filled, 5, seed=2)
    async with serving(filled) as web:
        await check(web, filled)


def state_of(stream: DataStream) -> IndexState | None:
    index = HashIndex(str(stream.path))
    try:
        return index.state()
    finally:
        index.close()


@pytest.mark.parametrize("damage", ["all", "middle", "empty"])
async def test_a_damaged_index_is_made_again(path: Path, damage: str) -> None:
    with DataStream.create(path, version=3, sync="os", index="memory") as stream:
        write(stream, 40)
        async with serving(stream) as web:
            await check(web, stream)
            # What is found may not be committed yet.
            while (state := state_of(stream)) is None or state.next < stream.total_entries:
                await trio.sleep(0.02)
        database = Path(f"{path}{SUFFIX}") / "hashes.sqlite"
        data = database.read_bytes()
        half = len(data) // 2
        whole = {"all": b"x" * len(data), "empty": b""}
        database.write_bytes(whole.get(damage, data[:half] + b"\xff" * 4096 + data[half + 4096 :]))
        async with serving(stream) as web:
            await check(web, stream)


async def test_damage_while_it_is_open(path: Path) -> None:
    index = HashIndex(str(path))
    assert index.begin()
    index.add(bytes(16) * 2, 0, 2, 2)
    database = Path(f"{path}{SUFFIX}") / "hashes.sqlite"
    index._run(lambda it: it.execute("DROP TABLE found"))
    assert index.find(0, 9, 9) == []
    # What was added before is not there: the state must not say so.
    with pytest.raises(Exception, match="made anew"):
        index.commit(IndexState(bytes(16), 0, 5))
    assert index.state() is None
    index.close()
    assert database.exists()


async def test_the_search_continues_after_a_damaged_page(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And says how many entries it lacks, until the page is whole again."""
    with DataStream.create(path, version=3, index="memory") as stream:
        write(stream, 40)
        first = stream.total_entries + 1  # one of the large entries is still in the first page
        append(stream, LARGE, LARGE)
        write(stream, 10)
        lost = range(first, stream.total_entries)
        append(stream, LARGE)
        write(stream, 10)
        known = expected(stream)
    monkeypatch.setattr("datastreamer.http.answers.explorer._AGAIN_SECONDS", 0.0)
    with path.open("r+b") as file:
        # No entry begins so: it is damaged also if the page is not compared with its checksum.
        file.seek(page_start(1))
        whole = file.read(17)
        file.seek(page_start(1))
        file.write(b"\xff" * 17)
    with DataStream.open(path, index="memory") as stream:
        async with serving(stream) as web:
            total = stream.total_entries
            while (found := await search(web, bytes(32)))["searched_entries"] < total:
                await trio.sleep(0.02)
            assert found["trouble"] == (
                f"{len(lost)} entries from entry {first} on cannot be read, since their pages are "
                "damaged; they are searched once these are restored"
            )
            assert (found["unread_entries"], found["complete"]) == (len(lost), False)
            for name, entries in known.items():
                rows = (await search(web, name, "?limit=100"))["found"]
                assert [row["entry"] for row in rows] == [e for e in entries if e not in lost]
            with path.open("r+b") as file:
                file.seek(page_start(1))
                file.write(whole)
            await check(web, stream)


async def test_what_cannot_be_searched_says_why(path: Path) -> None:
    folder = Path(f"{path}{SUFFIX}")
    folder.mkdir()
    folder.chmod(0o777)
    with DataStream.create(path, version=3, sync="os", index="memory") as stream:
        write(stream, 1)
        async with serving(stream) as web:
            while not (found := await search(web, bytes(32)))["trouble"]:
                await trio.sleep(0.02)
            assert str(folder) in found["trouble"]
            assert found["searched_entries"] == 0
            folder.chmod(0o700)
            await check(web, stream)


async def test_an_empty_stream_that_cannot_be_searched_says_why(path: Path) -> None:
    with DataStream.create(path, version=3, stream_type=2, sync="os", index="memory") as stream:
        async with serving(stream) as web:
            while not (found := await search(web, bytes(32)))["trouble"]:
                await trio.sleep(0.02)
            assert "this one is of type 2" in found["trouble"]


def test_several_processes_make_it(path: Path) -> None:
    """Those that open the index while it is made wait for that."""

    def open_it(_: int) -> IndexState | None:
        with closing(HashIndex(str(path))) as index:
            return index.state()

    with ThreadPoolExecutor(8) as threads:
        assert list(threads.map(open_it, range(40))) == [None] * 40
