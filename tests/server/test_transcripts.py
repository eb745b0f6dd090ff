"""The reference's recorded conversations, played to our server over loopback."""

from __future__ import annotations

import ast
import functools
import hashlib
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import trio

from datastreamer.protocol.commands import (
    Command,
    FilteredRead,
    FilteredStart,
    FilteredStartBookmark,
    encode_command,
)
from datastreamer.selection.clauses import Where
from datastreamer.storage.stream import DataStream
from tests.conftest import GOLDEN, Golden, make_data
from tests.network.fixtures import Open, Peer, over_loopback
from tests.network.model import BOOKMARK, Conversation, Model
from tests.protocol.transcripts import is_about_ranges, read_as_length_0

# Some conversations end while an operation is open, as they were recorded.
pytestmark = pytest.mark.filterwarnings("ignore:.*an atomic operation was open:ResourceWarning")

Step = dict[str, Any]


def conversations() -> list[Any]:
    golden = Golden(GOLDEN, Path())
    found = []
    for server in ("reference", "older", "fork"):
        for name, steps in golden.transcript(server).items():
            if server != "fork" and is_about_ranges(steps):
                continue  # the answers of a server that does not know the command
            if any(s.get("server_options") for s in steps):
                continue  # the reference's own timeouts
            found.append(pytest.param(steps, id=f"{server}:{name}"))
    return found


@functools.cache
def content_of(name: str) -> bytes:
    return Golden(GOLDEN, Path()).content(name)


@pytest.mark.parametrize("steps", conversations())
async def test_conversation(steps: list[Step], tmp_path: Path) -> None:
    await converse(steps, tmp_path, over_loopback)


@pytest.mark.parametrize(
    "steps",
    [
        # TLS concerns no single conversation; the soak tests have all with it.
        pytest.param(*each.values, id=each.id, marks=() if at % 4 == 0 else pytest.mark.soak)
        for at, each in enumerate(conversations())
    ],
)
async def test_conversation_with_tls(steps: list[Step], tmp_path: Path, secured: Open) -> None:
    await converse(steps, tmp_path, secured)


CLAUSES = (Where(2), Where(0xB0, 1, b"\xcd\xe9"), Where(2**32 - 1))


@pytest.mark.parametrize(
    ("name", "command"),
    [
        ("selected-read", FilteredRead(2, CLAUSES)),
        ("selected-start", FilteredStart(4, CLAUSES)),
        ("selected-start-bookmark", FilteredStartBookmark(b"xxxx", CLAUSES)),
    ],
)
async def test_selections(name: str, command: Command, golden: Golden, tmp_path: Path) -> None:
    """Requests that only we know: bytes that were packed by hand, from both of our sides."""
    [step] = golden.transcript("selections")[name]
    sent = bytes.fromhex(step["send_hex"])
    assert encode_command(command, 1) == sent
    path = tmp_path / "copy.bin"
    path.write_bytes(golden.content(step["file"]))
    with DataStream.open(path, sync="os", index="memory") as stream:
        async with over_loopback(stream) as rig, rig.client() as peer:
            await peer.ask(sent, bytes.fromhex(step["recv_hex"]))


async def converse(steps: list[Step], tmp_path: Path, open_server: Open) -> None:
    content = content_of(steps[0]["file"])
    model = Model(content)
    if steps[0].get("file_variant") == "no-spare":
        content = content[: 4096 + -(-(model.total_length - 4096) >> 20 << 20)]
    path = tmp_path / "copy.bin"
    path.write_bytes(content)
    with DataStream.open(path, sync="os", index="memory") as stream:
        async with open_server(stream) as rig, rig.client() as peer:
            talk = Conversation(model)
            for step in steps:
                answer = await play(step, talk, peer, stream)
                if talk.closed or parts_ways(step, answer):
                    break


def parts_ways(step: Step, answer: bytes) -> bool:
    """Whether the recorded server took what ours refuses, or the reverse.

    Only where that is a defect or a quirk of the recorded one; what follows it there
    says nothing about a server that decided otherwise.
    """
    recorded = bytes.fromhex(step.get("recv_hex", ""))
    return step["class"] != "contract" and bool(answer) and answer[:9] != recorded[:9]


async def play(step: Step, talk: Conversation, peer: Peer, stream: DataStream) -> bytes:
    """Do one step; gives what the server sent, which is what the model says."""
    operations = step.get("server_operations", ())
    expected = b"".join([operate(operation, talk, stream) for operation in operations])
    if talk.closed:
        assert await peer.was_reset() == b""
        return b""
    sent = bytes.fromhex(step["send_hex"])
    expected += talk.feed(sent)
    for part in cut(sent, step.get("send_as")):
        await peer.send(part)
        await trio.lowlevel.checkpoint()
    if step.get("client_ends_sending"):
        await peer.stream.send_eof()
        talk.closed = True
    await peer.expect(expected)
    if step["class"] == "contract":
        compare(step, expected)
        refused = expected.endswith((b"Already started", b"Already stopped"))
        assert talk.closed == (step["closed_after"] or refused or read_as_length_0(step))
    if talk.closed:
        await peer.ended()
    elif not talk.unread:
        await peer.nothing_more()
    return expected


def operate(operation: Step, talk: Conversation, stream: DataStream) -> bytes:
    """Do it to the stream and to the model; gives what a streaming client is to get."""
    model = talk.model
    match operation["op"]:
        case "start_op":
            stream.start_atomic_op()
        case "bookmark":
            data = make_data(operation["data"])
            number = stream.add_bookmark(data)
            assert number == operation["result"]["number"]
            model.pending.append((BOOKMARK, data))
        case "entry":
            data = make_data(operation["data"])
            number = stream.add_entry(operation["type"], data)
            assert number == operation["result"]["number"]
            model.pending.append((operation["type"], data))
        case "commit":
            stream.commit_atomic_op()
            model.commit()
            return talk.moved()
        case "rollback":
            stream.rollback_atomic_op()
            model.pending.clear()
        case "truncate":
            stream.truncate(operation["entry"])
            model.truncate(operation["entry"])
            talk.closed = talk.streaming and talk.sent > operation["entry"]
        case "update":
            data = make_data(operation["data"])
            stream.update_entry(operation["entry"], operation["type"], data)
            model.entries[operation["entry"]] = (operation["type"], data)
        case other:
            raise AssertionError(f"unknown operation {other}")
    return b""


def cut(data: bytes, how: str | None) -> list[bytes]:
    if how is None:
        return [data] if data else []
    if how == "one byte at a time":
        return [data[at : at + 1] for at in range(len(data))]
    words, _, places = how.partition("[")
    assert words == "segments cut at "
    bounds = [0, *ast.literal_eval(f"[{places}"), len(data)]
    return [data[a:b] for a, b in pairwise(bounds)]


def compare(step: Step, got: bytes) -> None:
    if "recv_hex" in step:
        assert got.hex() == step["recv_hex"]
    else:
        assert len(got) == step["recv_len"]
        assert hashlib.sha256(got).hexdigest() == step["recv_sha256"]
