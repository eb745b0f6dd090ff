"""Makes damaged pages of a relay's own file whole, with the entries that its upstream has now.

Owns what the upstream's answer is used for. If it matches the page's checksum, the page is as it
was. If not, and it has the numbers and the size of what the page held, the upstream has updated
entries of it: they become the page, with a new checksum. Anything else is a difference, for which
`upstreams.py` decides what follows. Truncates nothing.
"""

from __future__ import annotations

import logging
from contextlib import nullcontext

import trio
from xxhash import xxh3_128_digest

from datastreamer.errors import (
    ConnectionLost,
    DamagedEntry,
    DamagedPage,
    NoAnswer,
    StreamFileError,
    UpdateRefused,
    UpstreamRewritten,
)
from datastreamer.format import PAGE_SIZE, Header
from datastreamer.relay.apply_changes import keeping_agreement, known_agreement
from datastreamer.relay.client import RelayClient
from datastreamer.relay.compare import Connect
from datastreamer.relay.joining import header_of_same, shorter
from datastreamer.storage.stream import DataStream

_log = logging.getLogger(__name__)


async def restore_pages(
    connect: Connect, stream: DataStream, damage: DamagedEntry, timeout: float
) -> int:
    """Restore the pages of the file in which `damage` was met; returns how many were restored.

    No operation may be open. `timeout` bounds the time without any answer. Raises `StreamFileError`
    if no page there differs from its checksum, `UpstreamDiffers` if the upstream holds no such
    entries, `PeerError`, and what a change of the file raises.
    """
    damaged = await trio.to_thread.run_sync(stream.parts.pages.damaged_around, damage.offset)
    if not damaged:
        raise StreamFileError(damage.path, damage.what) from damage
    async with connect() as client:
        stream_id = (await client.capabilities()).stream_id
        for page in damaged:
            header, entries = await _received(client, stream, page, timeout)
            if header.total_entries < page.end:
                raise shorter(client.peer, header.total_entries, stream.total_entries)
            answer = _ReceivedPage(client.peer, header, stream_id, entries)
            await trio.to_thread.run_sync(_restore, stream, page, answer)
    return len(damaged)


class _ReceivedPage:
    """An upstream's answer for one page, as a `Peer`."""

    only_proven = False

    def __init__(self, name: str, header: Header, stream_id: bytes, content: bytes) -> None:
        self.name = name
        self.content = content
        self._header = header
        self._stream_id = stream_id

    def header(self) -> Header:
        return self._header

    def stream_id(self) -> bytes:
        return self._stream_id

    def entries(self, first: int, stop: int, most: int) -> bytes:
        return self.content

    def close(self) -> None:
        """There is no connection."""


async def _received(
    client: RelayClient, stream: DataStream, page: DamagedPage, timeout: float
) -> tuple[Header, bytes]:
    """The upstream's header, and the entries of a page as it has them now: none if it holds fewer,
    and only some if they are larger than a page. Raises `UpstreamMismatch` and `PeerError`."""
    with trio.move_on_after(timeout) as patience:
        header = await header_of_same(client, stream)
        entries = b""
        if header.total_entries < page.end:
            return header, entries
        async with client.batches(from_entry=page.first, stop=page.end) as batches:
            async for batch in batches:
                entries += batch.packed()
                patience.deadline = trio.current_time() + timeout
                if len(entries) > PAGE_SIZE:
                    return header, entries
        if (await client.capabilities()).changes:
            # The upstream compares its pages with their checksums for this answer.
            known = await client.range_hash(page.first, page.end)
            if (known.end, known.digest) != (page.end, xxh3_128_digest(entries)):
                raise ConnectionLost(
                    f"{client.peer} has changed entries {page.first} to {page.end - 1} while it "
                    "sent them; requesting them again"
                )
        return header, entries
    raise NoAnswer(f"no answer from {client.peer} within {timeout:g} s")


def _restore(stream: DataStream, page: DamagedPage, answer: _ReceivedPage) -> None:
    """Raises `UpstreamRewritten`."""
    healed = stream.parts.pages.heal(page.page, [answer])
    if healed is not None and healed.source:
        return
    agreement = known_agreement(stream)
    agrees = agreement is not None and agreement.stream_id == answer.stream_id()
    with keeping_agreement(stream) if agrees else nullcontext():
        try:
            kept = stream.parts.relay.replace_page(page.page, answer.content)
        except UpdateRefused as refused:
            raise UpstreamRewritten(
                f"{answer.name} has another history: its entries {page.first} to {page.end - 1} "
                "do not fit into a damaged page of this relay's file, which held these",
                page.first,
            ) from refused
    _log.warning(
        "%s: replaced by these entries as %s has them now, since it has updated some of them; the "
        "damaged bytes are kept in %s",
        *(page, answer.name, kept),
    )
