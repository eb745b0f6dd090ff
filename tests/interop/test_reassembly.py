"""Payloads from the reference's server and from ours together."""

from __future__ import annotations

from pathlib import Path

import trio

from datastreamer import Backoff, DataStream, SqliteStore, StreamServer, reassemble
from datastreamer.consumer.state import SourceState
from datastreamer.reassembly import PayloadComplete, Splitter, pack_message
from tests.interop.peer import GoPeer, beside_reference

pytestmark = beside_reference

PATIENCE = 60.0
MESSAGE = 0x10


def own(number: int) -> bytes:
    return b"%032d" % number


def messages_of(number: int) -> list[bytes]:
    parts = {b"\x01" + own(number): [(bytes([at]), b"part") for at in range(5)]}
    return [pack_message(*message) for message in Splitter().split(own(number), parts)]


def publish(server: GoPeer, messages: list[bytes]) -> None:
    """As the reference writes them."""
    server.start_op()
    server.add_bookmark(b"a payload")
    for message in messages:
        server.add_entry(MESSAGE, message)
    server.commit()


async def test_what_both_have_together(tmp_path: Path) -> None:
    """One of them is lost and reconnects; a second run continues after the first."""
    theirs, ours = tmp_path / "theirs.bin", tmp_path / "ours.bin"
    in_thread = trio.to_thread.run_sync

    async def take(payloads: object, count: int) -> list[int]:
        found = []
        async for payload in payloads:  # type: ignore[attr-defined]
            assert isinstance(payload, PayloadComplete)
            assert len(payload.parts) == 5
            found.append(int(payload.id))
            if len(found) == count:
                break
        return sorted(found)

    with (
        trio.fail_after(PATIENCE),
        StreamServer(ours, host="127.0.0.1", port=0, in_process=True) as server,
        SqliteStore(tmp_path / "places.db") as store,
    ):
        stream: DataStream = server.stream
        first = await in_thread(GoPeer.serve, theirs)
        address = first.address
        upstreams = {"theirs": address, "ours": ("127.0.0.1", server.port)}
        with first:
            await in_thread(publish, first, messages_of(1) + messages_of(2)[:3])
            with stream.atomic_op() as op:
                op.add_entries(MESSAGE, messages_of(2)[2:] + messages_of(3)[:4])
            async with reassemble(
                upstreams, store=store, backoff=Backoff(0.05, 0.2), follow=True
            ) as payloads:
                assert await take(payloads, 2) == [1, 2]
                await in_thread(first.process.kill)
                await in_thread(first.process.wait)
                with stream.atomic_op() as op:
                    op.add_entries(MESSAGE, messages_of(4))
                assert await take(payloads, 1) == [4]
                again = await in_thread(lambda: GoPeer.serve(theirs, port=address[1]))
                with again:
                    await in_thread(publish, again, messages_of(3)[4:])
                    assert await take(payloads, 1) == [3]
                    await in_thread(publish, again, messages_of(5))
                    assert payloads.sources["ours"] is SourceState.reading
        with await in_thread(lambda: GoPeer.serve(theirs, port=address[1])):
            async with reassemble(upstreams, store=store) as payloads:
                assert await take(payloads, 99) == [5]
