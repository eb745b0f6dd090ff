"""Look-ups of bookmarks while the stream moves: at once, or in a thread where much is to read."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from datastreamer.errors import DamagedEntry
from datastreamer.server.answers import bookmark_queries as look_ups
from datastreamer.server.answers import queries as answers_module
from datastreamer.server.streaming import cold_reads as cold_module
from datastreamer.server.streaming.turns import Turns
from datastreamer.storage.bookmarks import keeper as keeper_module
from datastreamer.storage.bookmarks._at_hand import LookUpsAtHand
from datastreamer.storage.stream import DataStream
from tests.network import model as wire
from tests.network.fixtures import append, over_loopback, seeds
from tests.network.model import BOOKMARK, NOT_FOUND, OK, Conversation, Model, result

MIB = 1 << 20


def modelled(stream: DataStream) -> Model:
    return Model(Path(stream.path).read_bytes())


@pytest.fixture(params=["lmdb", "memory"])
def writer(path: Path, request: pytest.FixtureRequest) -> Iterator[DataStream]:
    with DataStream.create(path, sync="os", index=request.param) as made:
        yield made


@pytest.fixture(params=["one process", "a follower"])
def served(writer: DataStream, request: pytest.FixtureRequest) -> Iterator[DataStream]:
    """What the server has open, of the stream that `writer` writes."""
    if request.param == "one process":
        yield writer
        return
    with DataStream.open(writer.path, follow=True, index=writer.index_name) as opened:
        yield opened


@pytest.fixture(params=["inline", "in a thread", "in a thread for the disk"])
def where(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "in a thread":
        monkeypatch.setattr(look_ups, "_INLINE_SCAN", -1)
    never = 1 << 30
    quick = 0 if request.param == "inline" else never
    monkeypatch.setattr(cold_module, "_QUICK_LOOKUPS", quick)
    return str(request.param)


@pytest.mark.usefixtures("where")
async def test_bookmarks_new_and_old(writer: DataStream, served: DataStream) -> None:
    async with over_loopback(served) as rig, rig.client() as peer:
        for turn in range(12):
            append(
                writer,
                (BOOKMARK, b"again"),
                (BOOKMARK, b"%d" % turn),
                (1, bytes([turn]) * 300_000),
                (BOOKMARK, b"last"),
            )
            talk = Conversation(modelled(writer))
            for key in (b"again", b"0", b"%d" % turn, b"%d" % (turn // 2), b"last", b"none"):
                await peer.ask(wire.bookmark(key), talk.feed(wire.bookmark(key)))
        for key in (b"11", b"last", b"none"):
            request = wire.start_bookmark(key)
            await peer.ask(request, talk.feed(request))
            if talk.streaming:
                await peer.ask(wire.stop(), talk.feed(wire.stop()))
        writer.truncate(30)
        talk = Conversation(modelled(writer))
        for key in (b"again", b"7", b"8", b"last"):
            await peer.ask(wire.bookmark(key), talk.feed(wire.bookmark(key)))


@pytest.mark.usefixtures("where")
async def test_an_event_far_behind_its_bookmark(writer: DataStream, served: DataStream) -> None:
    """More than a page of bookmarks is between them."""
    writer.start_atomic_op()
    writer.add_bookmark(b"far")
    for number in range(45_000):
        writer.add_bookmark(b"%16d" % number)
    number = writer.add_entry(7, b"at last")
    writer.commit_atomic_op()
    assert writer.header.total_length > MIB
    async with over_loopback(served) as rig, rig.client() as peer:
        await peer.ask(wire.bookmark(b"far"), OK + wire.pack(number, 7, b"at last", packet=0xFE))


@seeds(1, 30)
@pytest.mark.usefixtures("where")
async def test_answers_are_true_at_some_moment_of_the_question(
    writer: DataStream, served: DataStream, seed: int
) -> None:
    """Beside a writer that appends and truncates, each answer fits a state of the stream
    between question and answer: the bookmark's entry, and which event follows it, may
    be of two states that follow one another."""
    choose = random.Random(seed)
    keys = [b"a", b"b", b"c", b"d"]
    states: list[Model] = []

    def note() -> None:
        states.append(modelled(writer))

    def fits(key: bytes, answer: bytes, first: int) -> bool:
        """Whether a state from `first` on, or two in a row, give this answer."""
        places = [model.number_of(key) for model in states[first:]]
        return any(
            answer == after(number, model)
            for number, pair in zip(places, pairs(states[first:]), strict=True)
            for model in pair
        )

    def write() -> None:
        for turn in range(100):
            if turn % 7 == 6 and writer.total_entries > 8:
                writer.truncate(writer.total_entries - choose.randrange(1, 8))
            else:
                entries = [
                    (BOOKMARK, choose.choice(keys)) if choose.random() < 0.4 else (1, b"%d" % turn)
                    for _ in range(6)
                ]
                append(writer, *entries)
            note()

    note()
    over = trio.Event()
    async with over_loopback(served) as rig:

        async def ask(key: bytes) -> None:
            async with rig.client() as peer:
                while not over.is_set():
                    first = len(states) - 1
                    await peer.send(wire.bookmark(key))
                    answer = OK + (await peer.packet(), await peer.packet())[1]
                    # The state of a commit is noted right after it.
                    while len(states) < first + 2 and not over.is_set():
                        await trio.lowlevel.checkpoint()
                    pending.append((key, answer, first))

        pending: list[tuple[bytes, bytes, int]] = []
        async with trio.open_nursery() as nursery:
            for key in keys:
                nursery.start_soon(ask, key)
            await trio.to_thread.run_sync(write)
            over.set()
    assert pending
    for key, answer, first in pending:
        assert fits(key, answer, first), (key, answer)


def pairs(models: list[Model]) -> list[tuple[Model, ...]]:
    return [tuple(models[at : at + 2]) for at in range(len(models))]


def after(number: int | None, model: Model) -> bytes:
    """The answer to a Bookmark query whose key is at `number`."""
    if number is None:
        return NOT_FOUND
    events = enumerate(model.entries[number:], number)
    found = next(((at, entry) for at, entry in events if entry[0] != BOOKMARK), None)
    return NOT_FOUND if found is None else OK + wire.pack(found[0], *found[1], packet=0xFE)


async def test_a_start_from_a_bookmark_that_goes_while_it_is_looked_up(
    writer: DataStream, served: DataStream, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(look_ups, "_INLINE_SCAN", -1)
    append(writer, (1, b"zero"), (1, b"one"), (BOOKMARK, b"key"), (1, b"three"))
    looked_up = trio.Event()
    token = trio.lowlevel.current_trio_token()
    real = DataStream.bookmark
    first = True

    def slow(self: DataStream, key: bytes) -> int:
        nonlocal first
        number = real(self, key)
        if first:
            first = False
            trio.from_thread.run_sync(looked_up.set, trio_token=token)
            trio.from_thread.run(changed.wait, trio_token=token)
        return number

    monkeypatch.setattr(DataStream, "bookmark", slow)
    changed = trio.Event()
    async with over_loopback(served) as rig, rig.client() as peer, rig.client() as other:
        await peer.send(wire.start_bookmark(b"key"))
        await looked_up.wait()
        writer.truncate(1)
        append(writer, (1, b"another"), (1, b"and one"), (1, b"more"))
        await other.ask(wire.header(), OK + modelled(writer).header())
        changed.set()
        await peer.expect(result(4))
        await peer.ask(wire.entry(2), OK + wire.pack(2, 1, b"and one", packet=0xFE))
        await peer.ask(wire.bookmark(b"key"), NOT_FOUND)


@pytest.mark.parametrize("how", ["truncated", "being changed"])
@pytest.mark.parametrize("question", [wire.bookmark(b"key"), wire.entry(1)], ids=["key", "number"])
async def test_a_question_that_meets_a_change_is_answered(
    writer: DataStream, monkeypatch: pytest.MonkeyPatch, how: str, question: bytes
) -> None:
    """Also where nothing else is asked, and nothing committed, after it."""
    append(writer, (BOOKMARK, b"key"), (1, b"event"), (1, b"more"))
    changing = [True, False]
    look = Turns.look

    def met(*_: object) -> None:
        monkeypatch.undo()
        if how == "truncated":
            writer.truncate(2)
        else:
            monkeypatch.setattr(Turns, "look", lambda it: changing.pop(0) or look(it))
        raise DamagedEntry(writer.path, 4096, "half of another one")

    async with over_loopback(writer) as rig, rig.client() as peer:
        monkeypatch.setattr(answers_module.QueryAnswers, "_first_event", met)
        monkeypatch.setattr(answers_module.QueryAnswers, "_entry", met)
        monkeypatch.setattr(answers_module.QueryAnswers, "answer_at_hand", lambda *_: 0)
        await peer.ask(question, OK + wire.pack(1, 1, b"event", packet=0xFE))


@pytest.mark.parametrize("follows", [False, True], ids=["one process", "a follower"])
async def test_look_ups_share_a_view(
    path: Path, follows: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And it is released before the event loop waits, so that the index can reuse its pages."""
    monkeypatch.setattr(cold_module, "_QUICK_LOOKUPS", 0)
    views: list[LookUpsAtHand] = []
    open_views: list[LookUpsAtHand] = []

    class Counted(LookUpsAtHand):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            views.append(self)
            open_views.append(self)

        def end(self) -> None:
            open_views.remove(self)
            super().end()

    monkeypatch.setattr(keeper_module, "LookUpsAtHand", Counted)
    clients, rounds = 20, 10
    with contextlib.ExitStack() as streams:
        served = writer = streams.enter_context(DataStream.create(path, index="lmdb"))
        for turn in range(rounds):
            append(writer, (BOOKMARK, b"%d" % turn), (1, b"event"))
        writer.bookmarks.wait()
        if follows:
            served = streams.enter_context(DataStream.open(path, follow=True))
        async with over_loopback(served) as rig, contextlib.AsyncExitStack() as stack:
            peers = [await stack.enter_async_context(rig.client()) for _ in range(clients)]
            for turn in range(rounds):
                for peer in peers:
                    # At once, so that the event loop finds them in one turn.
                    peer.stream.socket._sock.sendall(wire.bookmark(b"%d" % turn))
                for peer in peers:
                    await peer.expect(OK + wire.pack(2 * turn + 1, 1, b"event", packet=0xFE))
                await wait_all_tasks_blocked(0.001)
                assert not open_views
    assert rounds <= len(views) <= 2 * rounds


async def test_answers_that_a_commit_overtakes(writer: DataStream) -> None:
    """A client that saw a commit is answered with it, whatever the server had seen before."""
    with DataStream.open(writer.path, follow=True) as served:
        async with over_loopback(served) as rig, rig.client() as peer:
            for turn in range(200):
                append(writer, (BOOKMARK, b"%d" % turn), (1, b"event"))
                header = OK + writer.header.pack()
                event = OK + wire.pack(2 * turn + 1, 1, b"event", packet=0xFE)
                await peer.send(wire.header() + wire.bookmark(b"%d" % turn) + wire.header())
                await peer.expect(header + event + header)


@pytest.mark.parametrize("change", ["truncated", "not changed"])
async def test_answers_that_are_read_again(
    path: Path, change: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A commit overtakes the first reading, and another process truncates the stream and writes
    into its place during the second one."""
    monkeypatch.setattr(cold_module, "_QUICK_LOOKUPS", 0)
    readings: list[tuple[int, int, int]] = []
    first = answers_module.answers_at_hand

    def changed(*asked: Any) -> tuple[int, int, int]:
        if len(readings) == 1 and change == "truncated":
            writer.truncate(0)
            writer.start_atomic_op()
            writer.add_bookmark(b"key")
            writer.add_entry(1, b"never")  # which is as long as "event"
            writer.add_entries(1, [bytes(100_000)] * 200)  # more than memory keeps
        readings.append(first(*asked))
        if len(readings) == 1:
            append(writer, (1, b"a commit"))
        return readings[-1]

    with DataStream.create(path, index="lmdb") as writer:
        append(writer, (BOOKMARK, b"key"), (1, b"event"), (1, b"another"))
        event = OK + wire.pack(1, 1, b"event", packet=0xFE)
        writer.bookmarks.wait()
        with DataStream.open(path, follow=True) as served:
            async with over_loopback(served) as rig, rig.client() as peer:
                for _ in range(3):
                    await peer.ask(wire.bookmark(b"key"), event)
                monkeypatch.setattr(answers_module, "answers_at_hand", changed)
                truncated = change == "truncated"
                await peer.ask(wire.bookmark(b"key"), NOT_FOUND if truncated else event)
                assert len(readings) == 2
                if truncated:
                    writer.rollback_atomic_op()
