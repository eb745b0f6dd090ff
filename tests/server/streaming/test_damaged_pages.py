"""A bit is changed on the disk: clients that are due the page are refused or disconnected."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import trio

from datastreamer.errors import DamagedPage
from datastreamer.format import PACKET_RESULT, RESULT_DAMAGED
from datastreamer.protocol.commands import HashQuery, encode_command
from datastreamer.server.streaming import catch_up as sender_module
from datastreamer.server.streaming import change_reports
from datastreamer.server.streaming.output import ClientOutput
from datastreamer.storage.disk.file_ops import Readable
from datastreamer.storage.pages.page_states import PageRegister, pages_between
from datastreamer.storage.read.range_sums import hash_range
from datastreamer.storage.stream import DataStream
from tests.network import filters
from tests.network import model as wire
from tests.network.damage import A_PAGE, FIRST, PAGE, PAGES, SIZE, evict, flip, written
from tests.network.fixtures import Open, append, in_memory, over_loopback, turned_away
from tests.network.model import OK, Model

BAD = 2
FIRST_BAD = BAD * A_PAGE


@pytest.fixture(params=["writer", "follower"])
def damaged(request: pytest.FixtureRequest, path: Path) -> Iterator[DataStream]:
    """A stream with one damaged page, nothing of which is in memory."""
    written(path)
    flip(path, BAD)
    follow = request.param == "follower"
    with DataStream.open(path, follow=follow, verify="never") as stream:
        yield stream


def good(path: str, start: int, stop: int) -> bytes:
    """These entries, which do not have the damage."""
    return Model(Path(path).read_bytes()).packed(start, stop)


REQUESTS = {
    "stream": wire.start(FIRST_BAD),
    "stream from the middle": wire.start(FIRST_BAD + A_PAGE - 1),
    "batch": wire.batch(FIRST_BAD + 3, 2),
    "large batch": wire.batch(FIRST_BAD, 100),
    "entry": wire.entry(FIRST_BAD + 30),
    "bookmark": wire.bookmark(b"key"),
    "start at bookmark": wire.start_bookmark(b"key"),
    "range": wire.range_bookmark(b"key", b"key"),
    "filtered read": filters.read(FIRST_BAD, 1),
    "filtered stream": filters.start(FIRST_BAD, 1),
}

FROM_BEFORE = {
    "stream": wire.start(FIRST_BAD - A_PAGE),
    "batch": wire.batch(FIRST_BAD - 1, 2) + wire.entry(FIRST_BAD),
    "large batch": wire.batch(FIRST_BAD - A_PAGE, 100) + wire.entry(FIRST_BAD),
    "filtered read": filters.read(FIRST_BAD - A_PAGE, wire.BOOKMARK) + wire.entry(FIRST_BAD),
    "filtered stream": filters.start(FIRST_BAD - A_PAGE, 1),
}
"""Requests that begin in the page before; a batch is answered up to the damage."""

CHANGED = bytes([FIRST_BAD % 251] * 4 + [FIRST_BAD % 251 ^ 4] + [FIRST_BAD % 251] * 4)
"""The bytes around what `flip` changes in the page."""


@pytest.mark.parametrize("request_", REQUESTS.values(), ids=REQUESTS)
@pytest.mark.parametrize("open_server", [over_loopback, in_memory])
async def test_who_asks_for_the_page_gets_none_of_it(
    damaged: DataStream, request_: bytes, open_server: Open, caplog: pytest.LogCaptureFixture
) -> None:
    async with open_server(damaged) as rig:
        for _ in range(3):  # also when the page is resident
            async with rig.client() as peer:
                await peer.send(request_)
                got = await turned_away(peer)
                assert got in (b"", OK), got[:60]
        lines = [r.getMessage() for r in caplog.records if r.levelno >= logging.ERROR]
        assert len(lines) == 1
        words = f"{damaged.path}: at byte {FIRST + BAD * PAGE}: page {BAD} (entries {FIRST_BAD} to "
        assert lines[0].startswith(f"{words}{FIRST_BAD + A_PAGE - 1}): the entries do not match")
        errors = rig.server.counts.errors
        assert errors["DamagedPage"] + errors["damaged"] == errors.total() == 3
        assert [each.page for each in rig.server.broadcast.pages.damaged] == [BAD]
        assert rig.server.unready == ""
        async with rig.client() as other:
            number = FIRST_BAD + A_PAGE
            answer = OK + b"\xfe" + good(damaged.path, number, number + 1)[1:]
            await other.ask(wire.entry(number), answer)


@pytest.mark.parametrize("resident", [False, True])
async def test_a_hash_of_the_page_is_refused(
    damaged: DataStream, resident: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Also of a page that another process has read: damage must not be taken for an update."""
    if resident:
        Path(damaged.path).read_bytes()
    query = encode_command(HashQuery(FIRST_BAD + 1, FIRST_BAD + 2), 1)
    async with over_loopback(damaged) as rig, rig.client() as peer:
        for _ in range(2):
            await peer.send(query)
            head = await peer.read(9)  # of a Result: its type, length, number
            assert head[0] == PACKET_RESULT
            assert int.from_bytes(head[5:], "big") == RESULT_DAMAGED
            await peer.read(int.from_bytes(head[1:5], "big") - len(head))
        assert [each.page for each in rig.server.broadcast.pages.damaged] == [BAD]
        assert len([r for r in caplog.records if r.levelno >= logging.ERROR]) == 1


@pytest.mark.parametrize("open_server", [over_loopback, in_memory, "secured"])
async def test_a_stream_ends_where_the_page_begins(
    damaged: DataStream, open_server: Open | str, request: pytest.FixtureRequest
) -> None:
    made: Open = (
        request.getfixturevalue(open_server) if isinstance(open_server, str) else open_server
    )
    async with made(damaged) as rig, rig.client() as peer:
        await peer.ask(wire.start(0), OK)
        got = await turned_away(peer)
        assert good(damaged.path, 0, FIRST_BAD).startswith(got)


async def test_the_others_are_undisturbed(path: Path) -> None:
    written(path)
    with DataStream.open(path, verify="never") as writer:
        flip(path, BAD)
        total = writer.total_entries
        async with (
            over_loopback(writer) as rig,
            rig.client() as live,
            rig.client() as later,
            rig.client() as meets,
        ):
            await live.ask(wire.start(total), OK)
            await meets.ask(wire.start(FIRST_BAD), OK)
            await later.ask(wire.start(FIRST_BAD + A_PAGE), OK)
            assert await turned_away(meets) == b""
            append(writer, (1, b"new"))
            await live.expect(good(writer.path, total, total + 1))
            await later.expect(good(writer.path, FIRST_BAD + A_PAGE, total + 1))
            assert rig.server.broadcast.cold.reads > 3


async def test_what_is_resident_is_sent_as_it_is(path: Path, cold: set[int]) -> None:
    """No thread reads: a catch-up from the page cache costs nothing."""
    written(path)
    whole = Model(path.read_bytes()).packed()
    with DataStream.open(path, verify="never") as writer:
        async with over_loopback(writer) as rig, rig.client() as peer:
            await peer.ask(wire.start(0), OK + whole)
            assert (rig.server.broadcast.cold.reads > 0) == bool(cold)


async def test_a_doubted_page_that_a_truncation_makes_the_last_one_is_sent(path: Path) -> None:
    written(path)
    with DataStream.open(path, verify="never") as writer:
        async with over_loopback(writer) as rig:
            rig.server.broadcast.pages.suspect(range(BAD + 1))
            writer.truncate(FIRST_BAD + 3)
            async with rig.client() as peer:
                await peer.ask(
                    wire.start(FIRST_BAD), OK + good(writer.path, FIRST_BAD, FIRST_BAD + 3)
                )


@pytest.fixture
def compared(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The pages that servers compare."""
    pages: list[int] = []
    verify = PageRegister.verify

    def counted(self: PageRegister, page: int, *, past_cache: Readable | None = None) -> bool:
        pages.append(page)
        return verify(self, page, past_cache=past_cache)

    monkeypatch.setattr(PageRegister, "verify", counted)
    return pages


@pytest.fixture
def cold(monkeypatch: pytest.MonkeyPatch) -> set[int]:
    """The pages that the system said it does not have in memory; it may drop any at any time."""
    pages: set[int] = set()
    resident = PageRegister.resident

    def asked(self: PageRegister, start: int, count: int) -> bool:
        answer = resident(self, start, count)
        if not answer:
            pages.update(pages_between(start, start + count))
        return answer

    monkeypatch.setattr(PageRegister, "resident", asked)
    return pages


async def test_each_read_from_the_disk_is_compared(path: Path, compared: list[int]) -> None:
    written(path)
    whole = Model(path.read_bytes()).packed()
    with DataStream.open(path, verify="never") as writer:
        async with over_loopback(writer) as rig:
            for _ in range(3):
                evict(path)
                async with rig.client() as peer:
                    await peer.ask(wire.start(0), OK + whole)
                assert sorted(compared) == list(range(PAGES))
                compared.clear()


async def test_verified_pages_in_memory_are_not_compared_again(
    path: Path, compared: list[int], cold: set[int]
) -> None:
    """Whatever is asked for, also while other pages are read from the disk."""
    written(path)
    whole = Model(path.read_bytes()).packed()
    with DataStream.open(path, verify="never") as writer:
        evict(path)
        async with over_loopback(writer) as rig, rig.client() as peer:
            await peer.ask(wire.start(0), OK + whole)
            await peer.ask(wire.stop(), OK)
            compared.clear()
            cold.clear()
            async with rig.client() as again:
                await again.ask(wire.start(0), OK + whole)
            for number in range(0, PAGES * A_PAGE, 20):
                answer = OK + b"\xfe" + good(writer.path, number, number + 1)[1:]
                await peer.ask(wire.entry(number), answer)
            for request_ in (wire.batch(0, 200), filters.read(0, 1), wire.bookmark(b"key")):
                await peer.ask(request_, OK)
                await peer.packet()
            assert set(compared) <= cold
            compared.clear()
            cold.clear()
            evict(path, FIRST + BAD * PAGE, PAGE)
            rig.server.broadcast.pages.ready.clear()  # as after a second
            async with rig.client() as again:
                await again.ask(wire.start(0), OK + whole)
            assert BAD in compared
            assert set(compared) <= cold


@pytest.mark.parametrize("resident", [True, False], ids=["rest resident", "all cold"])
@pytest.mark.parametrize(
    "request_",
    [*REQUESTS.values(), *FROM_BEFORE.values()],
    ids=[*REQUESTS, *(f"{name} from the page before" for name in FROM_BEFORE)],
)
async def test_a_verified_page_that_is_changed_on_the_disk(
    path: Path, request_: bytes, resident: bool
) -> None:
    """Nothing of it is sent, whether or not the pages around it are in memory."""
    written(path)
    whole = Model(path.read_bytes()).packed()
    with DataStream.open(path, follow=True, verify="never") as stream:
        evict(path)
        async with over_loopback(stream) as rig:
            async with rig.client() as peer:
                await peer.ask(wire.start(0), OK + whole)
            flip(path, BAD, only_page=resident)
            rig.server.broadcast.pages.ready.clear()  # as after a second
            async with rig.client() as peer:
                await peer.send(request_)
                sent = await turned_away(peer)
            assert CHANGED not in sent
            assert [each.page for each in rig.server.broadcast.pages.damaged] == [BAD]


async def test_an_entry_that_cannot_be_read_shows_the_damage_of_a_verified_page(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The log and the metric name it. The entries before it are sent as they were."""
    written(path)
    first = OK + b"\xfe" + good(str(path), FIRST_BAD, FIRST_BAD + 1)[1:]
    with DataStream.open(path, verify="never") as writer:
        evict(path)
        async with over_loopback(writer) as rig:
            pages = rig.server.broadcast.pages
            async with rig.client() as peer:
                await peer.ask(wire.entry(FIRST_BAD), first)
            # The length of an entry.
            flip(path, BAD, at=30 * (SIZE + 17) + 2, in_memory=True)
            for request_ in (wire.start(FIRST_BAD + 30), wire.entry(FIRST_BAD + 40)) * 2:
                async with rig.client() as peer:
                    await peer.send(request_)
                    assert await turned_away(peer) in (b"", OK)
                [error] = pages.damaged
                assert (error.page, error.first, error.end) == (BAD, FIRST_BAD, FIRST_BAD + A_PAGE)
                async with rig.client() as peer:
                    await peer.ask(wire.entry(FIRST_BAD), first)
            assert len([r for r in caplog.records if r.levelno >= logging.ERROR]) == 1


async def test_an_event_in_the_page_after_its_bookmark(path: Path) -> None:
    """The page of the bookmark is in memory."""
    with DataStream.create(path, sync="os") as made:
        filling = [(1, bytes([n]) * SIZE) for n in range(3 * A_PAGE)]
        append(made, *filling[:A_PAGE], (wire.BOOKMARK, b"edge"), *filling[A_PAGE:])
    with DataStream.open(path, follow=True, verify="never") as stream:
        assert [stream.reader.page_holding(A_PAGE + at) for at in (0, 1)] == [0, 1]
        evict(path)
        async with over_loopback(stream) as rig, rig.client() as peer:
            for number in (A_PAGE - 1, A_PAGE + 1):
                answer = OK + b"\xfe" + good(stream.path, number, number + 1)[1:]
                await peer.ask(wire.entry(number), answer)
            flip(path, 1, only_page=True)
            rig.server.broadcast.pages.ready.clear()  # as after a second
            await peer.send(wire.bookmark(b"edge"))
            assert await turned_away(peer) == b""


async def test_a_page_is_compared_again_after_a_wait_for_its_client(
    path: Path, compared: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The client accepts nothing at first, and meanwhile the page is evicted."""
    written(path)
    whole = Model(path.read_bytes()).packed()
    waits = 0

    def full(self: ClientOutput, file: int, offset: int, count: int) -> int:
        return send_file(self, file, offset, count) if waits else 0

    async def evicted(self: ClientOutput) -> None:
        nonlocal waits
        waits += 1
        if waits == 1:
            evict(path)
        else:
            await wait_writable(self)

    send_file, wait_writable = ClientOutput.send_file, ClientOutput.wait_writable
    monkeypatch.setattr(ClientOutput, "send_file", full)
    monkeypatch.setattr(ClientOutput, "wait_writable", evicted)
    with DataStream.open(path, verify="never") as writer:
        evict(path)
        async with over_loopback(writer) as rig, rig.client() as peer:
            await peer.ask(wire.start(0), OK + whole)
            assert sorted(compared) == [0, *range(PAGES)]


async def test_no_page_is_sent_while_it_is_hashed(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The hash reads it from the disk; only then is it compared."""
    written(path)
    whole = Model(path.read_bytes()).packed()

    def hashed(*what: Any) -> Any:
        found = hash_range(*what)
        assert rig.server.broadcast.pages.is_due(BAD)
        return found

    monkeypatch.setattr(change_reports, "hash_range", hashed)
    with DataStream.open(path, verify="never") as writer:
        evict(path)
        async with over_loopback(writer) as rig, rig.client() as peer:
            await peer.ask(wire.start(0), OK + whole)
            await peer.ask(wire.stop(), OK)
            evict(path)
            rig.server.broadcast.pages.ready.clear()  # as after a second
            await peer.ask(encode_command(HashQuery(FIRST_BAD, FIRST_BAD + 2), 1), OK)
            await peer.packet()
            assert not rig.server.broadcast.pages.is_due(BAD)


@pytest.mark.parametrize("indexed", [True, False])
async def test_a_damaged_key_is_no_missing_bookmark(path: Path, indexed: bool) -> None:
    written(path)
    if not indexed:
        shutil.rmtree(f"{path}.index")
    with DataStream.open(path, follow=True, verify="never") as writer:
        number = FIRST_BAD + 5
        offset = writer.reader.cursor(number).offset + 17
        flip(path, BAD, offset - FIRST - BAD * PAGE)
        async with over_loopback(writer) as rig, rig.client() as peer:
            await peer.send(wire.bookmark(b"key"))
            assert await turned_away(peer) == b""
            [error] = rig.server.broadcast.pages.damaged
            assert (error.page, error.first, error.end) == (BAD, FIRST_BAD, FIRST_BAD + A_PAGE)


async def test_an_old_place_in_a_long_stream(
    damaged: DataStream, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is found in a thread, which reads a part of the page."""
    monkeypatch.setattr(sender_module, "_INLINE_PLACE", 0)
    async with over_loopback(damaged) as rig, rig.client() as peer:
        await peer.ask(wire.start(FIRST_BAD + A_PAGE - 1), OK)
        assert await turned_away(peer) == b""


@pytest.mark.parametrize("page", [6, 8, 9])
async def test_damage_near_the_head_of_a_stream_that_is_cold_at_the_start(
    path: Path, page: int
) -> None:
    """There the residency of pages is not examined later. Page 9 is the last one, not whole."""
    written(path)
    flip(path, page)
    with DataStream.open(path, follow=True, verify="never") as follower:
        async with over_loopback(follower) as rig, rig.client() as peer:
            await peer.ask(wire.start(page * A_PAGE), OK)
            assert await turned_away(peer) == b""
            [error] = rig.server.broadcast.pages.damaged
            assert (error.page, error.first) == (page, page * A_PAGE)


async def test_the_place_to_begin_a_repair(damaged: DataStream) -> None:
    reported: list[list[DamagedPage]] = []
    async with over_loopback(damaged) as rig:
        pages = rig.server.broadcast.pages
        pages.on_damage = lambda: reported.append(pages.damaged)
        for _ in range(2):
            async with rig.client() as peer:
                await peer.send(wire.entry(FIRST_BAD))
                assert await turned_away(peer) == b""
        [[error]] = reported
        assert (error.page, error.first, error.end) == (BAD, FIRST_BAD, FIRST_BAD + A_PAGE)
        # Once it is whole again, it is served.
        flip(Path(damaged.path), BAD)
        async with rig.client() as peer:
            await peer.ask(
                wire.entry(FIRST_BAD),
                OK + b"\xfe" + good(damaged.path, FIRST_BAD, FIRST_BAD + 1)[1:],
            )
        assert rig.server.broadcast.pages.damaged == []


async def test_without_checksums_all_is_served(damaged: DataStream) -> None:
    """The writer still knows the hashes of the pages; another process does not."""
    Path(f"{damaged.path}.sums").unlink()
    whole = Model(Path(damaged.path).read_bytes()).packed()
    evict(Path(damaged.path))
    with DataStream.open(damaged.path, follow=True, verify="never") as stream:
        async with over_loopback(stream) as rig, rig.client() as peer:
            await peer.ask(wire.start(0), OK + whole)
            assert rig.server.broadcast.pages.damaged == []


async def test_a_page_that_is_damaged_on_the_disk_only(path: Path) -> None:
    """Clients that are due it are refused until it is written, whoever writes it."""
    written(path)
    whole = Model(path.read_bytes()).packed()
    with DataStream.open(path, verify="never") as stream:
        async with over_loopback(stream) as rig:
            pages, good = rig.server.broadcast.pages, stream._file.file
            disk = SimpleNamespace(read=lambda size, offset: bytes(size), size=good.size)
            with pytest.raises(DamagedPage) as found:
                pages.verify(BAD, past_cache=disk)  # type: ignore[arg-type]
            pages.found(found.value)
            async with rig.client() as peer:
                await peer.send(wire.start(FIRST_BAD))
                with trio.fail_after(20):
                    await turned_away(peer)
            assert stream.parts.pages.heal(BAD, []) is not None
            async with rig.client() as peer:
                with trio.fail_after(20):
                    await peer.ask(wire.start(0), OK + whole)


def test_a_truncation_forgets_what_the_disk_had(path: Path) -> None:
    written(path)
    with DataStream.open(path, verify="never") as stream:
        pages = stream.parts.pages.for_server()
        disk = SimpleNamespace(read=lambda size, offset: bytes(size))
        with pytest.raises(DamagedPage):
            pages.verify(BAD, past_cache=disk)  # type: ignore[arg-type]
        assert pages.is_bad_on_disk(BAD)
        stream.truncate(FIRST_BAD)
        assert not pages.is_bad_on_disk(BAD)
