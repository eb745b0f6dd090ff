"""Answers in one call: how many, up to which size, and of which state of the stream."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from datastreamer.protocol.commands import HeaderQuery
from datastreamer.server.answers import _at_hand as at_hand_module
from datastreamer.server.answers.queries import QueryAnswers
from datastreamer.storage.read._head import HeadCell
from datastreamer.storage.stream import DataStream
from tests.network import model as wire
from tests.network.fixtures import append, over_loopback
from tests.network.model import BOOKMARK, OK

LARGE = 20_000
HEADER = HeaderQuery()


@asynccontextmanager
async def answering(stream: DataStream) -> AsyncIterator[QueryAnswers]:
    """The answers of a client; everything is at hand."""
    append(stream, (BOOKMARK, b"key"), *((1, bytes(LARGE)) for _ in range(10)))
    async with over_loopback(stream) as rig, rig.client() as peer:
        # Some look-ups show that the index answers at once.
        for _ in range(20):
            await peer.ask(wire.entry(0), OK + wire.pack(0, BOOKMARK, b"key", packet=0xFE))
            event = wire.pack(1, 1, bytes(LARGE), packet=0xFE)
            await peer.ask(wire.bookmark(b"key"), OK + event)
        await peer.ask(wire.entry(10), OK + wire.pack(10, 1, bytes(LARGE), packet=0xFE))
        [session] = rig.server.sessions
        yield session.answers


async def test_of_all_kinds(stream: DataStream) -> None:
    async with answering(stream) as answers:
        assert answers.answer_at_hand([0, b"key", HEADER, b"other", 0]) == 5
        entry = OK + wire.pack(0, BOOKMARK, b"key", packet=0xFE)
        event = OK + wire.pack(1, 1, bytes(LARGE), packet=0xFE)
        header = OK + stream.header.pack()
        expected = [entry, event, header, wire.NOT_FOUND, entry]
        assert answers._answers == expected
        assert answers.size == sum(map(len, expected))
        assert answers._questions == [0, b"key", HEADER, b"other", 0]


async def test_up_to_their_size(stream: DataStream) -> None:
    """Also if some were read before."""
    async with answering(stream) as answers:
        assert answers.answer_at_hand([1]) == 1
        assert not answers.full
        assert answers.answer_at_hand([2, 3, 4, 5, 6]) == 3
        assert answers.full
        assert answers.answer_at_hand([7, 8]) == 1


async def test_up_to_what_is_no_entry(stream: DataStream) -> None:
    async with answering(stream) as answers:
        assert answers.answer_at_hand([1, 11, 2]) == 1
        assert answers.answer_at_hand([2**64 - 1]) == 0


async def test_nothing_of_a_stream_that_was_changed_meanwhile(
    stream: DataStream, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with answering(stream) as answers:
        assert answers.answer_at_hand([1]) == 1
        size, reader = answers.size, answers._stream.reader

        def changed() -> bytes:
            with reader.changing():
                return b"header"

        monkeypatch.setattr(answers, "_header", changed)
        assert answers.answer_at_hand([1, HEADER, b"key"]) == 0
        assert (len(answers._answers), len(answers._questions), answers.size) == (1, 1, size)
        with reader.changing():
            assert answers.answer_at_hand([1]) == 0


async def test_committed_entries_only(stream: DataStream) -> None:
    """Whatever the tables of the pages know."""
    async with answering(stream) as answers:
        reader = answers._stream.reader
        assert reader.at_hand is not None
        assert reader.head.entries == 11
        for asked, entries, expected in ((4, 5, 1), (4, 4, 0), (b"key", 2, 1), (b"key", 1, 0)):
            found: list[bytes] = []
            head = reader.head._replace(entries=entries)
            at_hand_module.answers_at_hand(
                [asked],
                reader.at_hand,
                HeadCell(head, reader.state.pages).now,
                answers._broadcast.pages.ready,
                answers._bookmarks,
                bytes,
                found,
                1 << 20,
            )
            assert len(found) == expected
