"""Queries: header, entry and bookmark, from one to many connections that each wait for the answer.

The limit is a bare Trio echo of the sizes of entry queries. Client and limit are the same raw
sockets in a process of its own; server and echo too.
"""

from __future__ import annotations

import statistics
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bench.bench_bookmarks import block_key, write_blocks
from bench.bench_serving import ANSWER, BARE_ECHO, helper
from bench.measure import Done
from bench.readers import Question, asked_at_once, asked_in_turn, some_numbers
from datastreamer import DataStream, StreamServer
from datastreamer.format import HEADER_SIZE

Address = tuple[str, int]
KINDS = ("header", "entry", "bookmark")
HEADER_ANSWER = 11 + HEADER_SIZE


def questions(kind: str, blocks: int, count: int) -> list[Question]:
    """Requests and the sizes of their answers: of blocks near to no order."""
    numbers = some_numbers(blocks, count)
    if kind == "header":
        return [Question(struct.pack(">QQ", 3, 1), HEADER_ANSWER)] * count
    if kind == "entry":
        return [Question(struct.pack(">QQQ", 5, 1, 2 * at + 1), ANSWER) for at in numbers]
    keys = map(block_key, numbers)
    return [Question(struct.pack(">QQI", 6, 1, len(key)) + key, ANSWER) for key in keys]


@pytest.fixture(scope="module")
def blocks(
    tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Iterator[tuple[int, Address, Address]]:
    """The number of blocks of one bookmark and one event; their server, and the echo."""
    count = 1_000 if request.config.getoption("benchmark_disable") else 100_000
    path: Path = tmp_path_factory.mktemp("blocks") / "stream.bin"
    write_blocks(path, count, events=1)
    with DataStream.open(path) as stream:
        stream.bookmarks.wait()
    server = StreamServer(path, host="127.0.0.1", port=0, sync="os")
    with server, helper(BARE_ECHO, ANSWER) as echo:
        yield count, server.addresses[0], echo


@pytest.mark.parametrize("connections", [1, 8, 64])
def test_waited(record: Any, smoke: bool, blocks: Any, connections: int) -> None:
    """Each connection waits for its answer: entry and bookmark queries, and the echo, in turn."""
    count, server, echo = blocks
    each = 200 if smoke else 10_000
    rates: dict[str, list[float]] = {}
    for _ in range(1 if smoke else 5):
        for kind in (*KINDS, "echo"):
            its = questions("entry" if kind == "echo" else kind, count, each)
            done = asked_in_turn(echo if kind == "echo" else server, its, connections)
            rates.setdefault(kind, []).append(_rate(done))
    found = {kind: statistics.median(each) for kind, each in rates.items()}
    for kind in KINDS:
        rivals = {"bare Trio echo": found["echo"]}
        promised = {"bare Trio echo": 0.75} if connections in (1, 64) else {}
        if kind == "bookmark":
            rivals["entry queries"] = found["entry"]
            promised["entry queries"] = 0.8
        record(
            f"{kind} queries, {connections} connections, each waited for",
            found[kind],
            rivals,
            unit="queries/s",
            at_least=promised or None,
            less_is_better=False,
        )


@pytest.mark.parametrize("kind", KINDS)
def test_in_flight(versus: Any, smoke: bool, blocks: Any, kind: str) -> None:
    count, server, _ = blocks
    its = questions(kind, count, 500 if smoke else 50_000)
    versus(
        f"{kind} queries, 100 in flight on one connection",
        lambda: asked_at_once(server, its, 100),
        {"promised": 2e5},
        unit="queries/s",
        at_least=1.0,
    )


def _rate(done: Done) -> float:
    assert done.amount is not None
    assert done.seconds is not None
    return done.amount / done.seconds
