"""Pages that the server finds damaged are restored from other servers while it serves."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import trio

from datastreamer.client.server_peer import ServerPeer
from datastreamer.client.upstream import Upstream
from datastreamer.errors import DamagedPage
from datastreamer.server import healer
from datastreamer.server.healer import Healer
from datastreamer.server.metrics import collect
from datastreamer.server.streaming.broadcast import Broadcast
from datastreamer.service.embedded import StreamServer
from datastreamer.storage.maintain.check import verify
from datastreamer.storage.stream import DataStream
from tests.network import model as wire
from tests.network.damage import A_PAGE, PAGES, SIZE, evict, flip, written
from tests.network.fixtures import Rig, append, over_loopback, turned_away
from tests.network.model import OK, Model
from tests.ports import free_port

BAD = 2
FIRST_BAD = BAD * A_PAGE


@pytest.fixture
def whole(path: Path) -> Path:
    """A copy of the stream at `path`, which does not have its damage."""
    written(path)
    copy = path.with_name("whole.bin")
    shutil.copyfile(path, copy)
    return copy


@pytest.fixture
def peer(whole: Path) -> Iterator[ServerPeer]:
    with StreamServer(whole, host="127.0.0.1", port=0, create=False, in_process=True) as server:
        yield ServerPeer(Upstream("127.0.0.1", server.port))


class Attempts:
    """The healer's attempts at a page, each of which is over when its result is known."""

    def __init__(self) -> None:
        self.over = 0
        self._ended = trio.Event()

    def end(self) -> None:
        self.over += 1
        self._ended.set()
        self._ended = trio.Event()

    async def until(self, condition: Callable[[], bool]) -> None:
        with trio.fail_after(20):
            while not condition():
                await self._ended.wait()

    async def heal(self, rig: Rig, pages: int) -> None:
        """Returns when that many pages are restored."""
        await self.until(lambda: rig.server.counts.healed_pages >= pages)


@pytest.fixture
def attempts(monkeypatch: pytest.MonkeyPatch) -> Attempts:
    noted, heal = Attempts(), Healer._heal

    async def attempt(self: Healer, broadcast: Broadcast, error: DamagedPage) -> None:
        await heal(self, broadcast, error)
        noted.end()

    monkeypatch.setattr(Healer, "_heal", attempt)
    return noted


@pytest.mark.parametrize("page", [0, BAD, PAGES])
async def test_a_page_that_a_client_meets(
    path: Path,
    whole: Path,
    peer: ServerPeer,
    attempts: Attempts,
    page: int,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.WARNING)
    flip(path, page)
    content = Model(whole.read_bytes())
    total = len(content.entries)
    with DataStream.open(path, verify="never") as stream:
        async with over_loopback(stream, heal_from=[peer]) as rig:
            async with rig.client() as meets:
                await meets.send(wire.start(page * A_PAGE))
                with pytest.raises((AssertionError, trio.BrokenResourceError)):
                    await meets.expect(OK + content.packed(page * A_PAGE))
            await attempts.heal(rig, 1)
            append(stream, (1, b"after"))
            async with rig.client() as again:
                await again.ask(wire.start(0), OK + content.packed())
                assert (await again.read(22))[-5:] == b"after"
            assert rig.server.broadcast.pages.damaged == []
            samples = (await collect(rig.server))["samples"]
            assert samples["datastreamer_healed_pages_total"] == [([], 1)]
            assert samples["datastreamer_damaged_pages"] == [([], 0)]
    assert verify(path).ok
    assert verify(path).entries == total + 1
    [kept] = path.parent.glob("stream.bin.*.repair")
    [line] = [each.getMessage() for each in caplog.records if "restored" in each.getMessage()]
    assert f"page {page} (" in line
    assert peer.name in line
    assert str(kept) in line


async def test_a_verified_page_that_changes_in_memory(
    path: Path, whole: Path, peer: ServerPeer, attempts: Attempts
) -> None:
    """A client that meets an entry which cannot be read has it restored."""
    with DataStream.open(path, verify="never") as stream:
        async with over_loopback(stream, heal_from=[peer]) as rig, rig.client() as client:
            content = Model(whole.read_bytes())
            await client.ask(wire.start(0), OK + content.packed())
            # The length of an entry.
            flip(path, BAD, at=30 * (SIZE + 17) + 2, in_memory=True)
            async with rig.client() as meets:
                await meets.send(wire.entry(FIRST_BAD + 40))
                assert await turned_away(meets) == b""
            await attempts.heal(rig, 1)
            async with rig.client() as again:
                await again.ask(wire.start(0), OK + content.packed())
    assert verify(path).ok


async def test_what_the_scrub_finds(path: Path, peer: ServerPeer, attempts: Attempts) -> None:
    for page in (1, 4, 7):
        flip(path, page)
    with DataStream.open(path, verify="never") as stream:
        async with over_loopback(stream, heal_from=[peer], scrub_rate=1e9) as rig:
            await attempts.heal(rig, 3)
    assert verify(path).ok


async def test_no_server_has_the_page(
    path: Path,
    whole: Path,
    attempts: Attempts,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Each reason is logged once; the servers are asked again after a while."""
    monkeypatch.setattr(healer, "_AGAIN_SECONDS", 0.05)
    flip(path, BAD)
    damaged = path.with_name("damaged.bin")
    shutil.copyfile(path, damaged)
    port = free_port()
    with StreamServer(damaged, host="127.0.0.1", port=0, create=False, in_process=True) as server:
        peers = [ServerPeer(Upstream("127.0.0.1", each)) for each in (server.port, port)]
        with DataStream.open(path, verify="never") as stream:
            async with over_loopback(stream, heal_from=peers) as rig:
                async with rig.client() as meets:
                    await meets.send(wire.entry(FIRST_BAD))
                    assert await turned_away(meets) == b""
                await attempts.until(lambda: attempts.over >= 3)
                lines = [
                    each.getMessage()
                    for each in caplog.records
                    if "was not restored" in each.getMessage()
                ]
                assert len(lines) == 1
                assert lines[0].startswith(f"{path}: page {BAD} (entries {FIRST_BAD} to ")
                assert all(each.name in lines[0] for each in peers)
                assert rig.server.counts.healed_pages == 0
                # A server that has it comes back.
                with StreamServer(
                    whole, host="127.0.0.1", port=port, create=False, in_process=True
                ):
                    await attempts.heal(rig, 1)
                answer = Model(whole.read_bytes()).packed(FIRST_BAD, FIRST_BAD + 1)
                async with rig.client() as again:
                    await again.ask(wire.entry(FIRST_BAD), OK + b"\xfe" + answer[1:])
    assert verify(path).ok


async def test_a_page_that_is_whole_again(path: Path, peer: ServerPeer, attempts: Attempts) -> None:
    """An operator was quicker."""
    flip(path, BAD)
    with DataStream.open(path, verify="never") as stream:
        async with over_loopback(stream, heal_from=[peer]) as rig:
            answers = peer.header

            def slow() -> object:
                flip(path, BAD)
                evict(path)
                raise healer.DatastreamerError("not now")

            peer.header = slow  # type: ignore[method-assign,assignment]
            async with rig.client() as meets:
                await meets.send(wire.entry(FIRST_BAD))
                assert await turned_away(meets) == b""
            await attempts.until(lambda: attempts.over >= 1)
            peer.header = answers  # type: ignore[method-assign]
            rig.server._healer.wake()
            await attempts.until(lambda: not rig.server.broadcast.pages.damaged)
            assert rig.server.counts.healed_pages == 0
    assert not list(path.parent.glob("stream.bin.*.repair"))


async def test_the_end_does_not_wait_for_a_silent_server(path: Path, whole: Path) -> None:
    flip(path, BAD)
    with trio.socket.socket() as silent:
        await silent.bind(("127.0.0.1", 0))
        silent.listen()
        peer = ServerPeer(Upstream("127.0.0.1", silent.getsockname()[1]))
        with DataStream.open(path, verify="never") as stream:
            async with over_loopback(stream, heal_from=[peer]) as rig:
                async with rig.client() as meets:
                    await meets.send(wire.entry(FIRST_BAD))
                    assert await turned_away(meets) == b""
                connection, _ = await silent.accept()
                with connection, trio.fail_after(2):
                    assert await rig.server.finish()
        peer.close()
