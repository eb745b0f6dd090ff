"""Questions of times and their answers: bytes that were packed by hand, and what is refused."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from datastreamer.errors import NotSupported, ProtocolViolation, TimeUnknown
from datastreamer.format import FEATURE_TIMES
from datastreamer.protocol.batches import ask_times
from datastreamer.protocol.client import ClientConnection
from datastreamer.protocol.commands import Command, MarksQuery, TimeQuery, encode_command
from datastreamer.protocol.following import decode_times, encode_times
from datastreamer.protocol.messages import OK, Capabilities, encode_result
from datastreamer.protocol.server import ServerConnection
from datastreamer.selection.times import LATEST_MS, TimeMarks
from tests.conftest import GOLDEN, Golden
from tests.protocol.test_server import fed

EVER = 2**64 - 1


def packed(marks: list[tuple[int, int]], resolution: int, following: int) -> bytes:
    """An answer, as docs/CLIENTS.md has it."""
    parts = [struct.pack(">QQ", *mark) for mark in marks]
    size = 25 + 16 * len(marks)
    return struct.pack(">BIQQI", 0xF2, size, resolution, following, len(marks)) + b"".join(parts)


def test_the_requests() -> None:
    for command, sent in (
        (TimeQuery(1_795_935_600_123), struct.pack(">QQQ", 0x100D, 1, 1_795_935_600_123)),
        (TimeQuery(EVER), struct.pack(">QQQ", 0x100D, 1, EVER)),
        (MarksQuery(7), struct.pack(">QQQ", 0x100E, 1, 7)),
        (MarksQuery(EVER), struct.pack(">QQQ", 0x100E, 1, EVER)),
    ):
        assert encode_command(command, 1) == sent
        assert fed(ServerConnection(1), [sent]) == [command]
    assert Capabilities().features & 1 << 9 == FEATURE_TIMES


rising = st.lists(st.integers(0, 2**63), max_size=9, unique=True).map(sorted)
times = st.lists(st.integers(0, LATEST_MS), min_size=9, max_size=9).map(sorted)


@given(rising, times, st.integers(0, LATEST_MS), st.integers(2**63 + 1, EVER))
def test_an_answer(entries: list[int], ms: list[int], resolution: int, following: int) -> None:
    marks = list(zip(entries, ms, strict=False))
    found = TimeMarks(marks, resolution, following)
    data = encode_times(found)
    assert data == packed(marks, resolution, following)
    assert decode_times(data, MarksQuery(0)) == found


@pytest.mark.parametrize(
    "answer",
    [
        packed([(5, 1), (5, 2)], 1, 9),
        packed([(6, 1), (5, 2)], 1, 9),
        packed([(5, 1)], 1, 5),
        packed([(5, LATEST_MS + 1)], 1, 9),
        packed([(5, 1)], LATEST_MS + 1, 9),
        packed([(n, 1) for n in range(257)], 1, 9000),
        b"\xf2\x00\x00\x00\x18",
        b"\xf2\xff\xff\xff\xff",
        packed([], 1, 9)[:-4] + struct.pack(">I", 1),
    ],
)
def test_a_wrong_answer(answer: bytes) -> None:
    connection = ClientConnection(peer="stub:1")
    connection.request(MarksQuery(5))
    # Something that follows, so that a short one is not waited for.
    connection.feed(OK + answer + bytes(70_000))
    with pytest.raises(ProtocolViolation, match=r"^stub:1 sent"):
        connection.next_event()


def drive(query: Command, *received: bytes, **options: Any) -> tuple[list[bytes], Any]:
    connection, sent = ClientConnection(peer="stub:1", **options), []
    flow = ask_times(connection, query)  # type: ignore[arg-type]
    parts = iter(received)
    try:
        while True:
            data = next(flow)
            if data is None:
                connection.feed(next(parts))
            else:
                sent.append(data)
    except StopIteration as done:
        return sent, done.value


HEADER = OK + bytes.fromhex("0100000026") + bytes(1) + struct.pack(">QQQQ", 0, 1, 4096, 0)
KNOWS = OK + Capabilities().pack() + HEADER
OLDER = OK + Capabilities(features=0x1FF & ~4).pack() + HEADER


def test_a_server_is_asked_if_it_has_the_capability() -> None:
    sent, found = drive(TimeQuery(5), KNOWS, OK + packed([], 0, 77))
    assert found.next == 77
    assert sent[1] == encode_command(TimeQuery(5), 1)
    marks = [(3, 40), (9, 50)]
    _, found = drive(MarksQuery(3), KNOWS, OK + packed(marks, 1000, 12))
    assert found == (marks, 1000, 12)


@pytest.mark.parametrize("received", [OLDER, encode_result(9) + HEADER])
def test_an_older_server_is_refused_by_name(received: bytes) -> None:
    with pytest.raises(NotSupported, match=r"^stub:1 does not report when entries were committed"):
        drive(TimeQuery(5), received)
    with pytest.raises(NotSupported, match="does not report"):
        drive(MarksQuery(5), extensions=False)


def test_a_time_that_is_not_known() -> None:
    words = "it is not known which entry was committed first at or after 2026-11-29T07:00:00Z"
    with pytest.raises(TimeUnknown) as caught:
        drive(TimeQuery(5), KNOWS, encode_result(28, words))
    assert str(caught.value) == f"stub:1: {words}"


@pytest.mark.parametrize(
    ("name", "command"),
    [
        ("entry-at-time", TimeQuery(1_795_935_601_500)),
        ("time-marks", MarksQuery(4)),
    ],
)
def test_the_golden_bytes(name: str, command: Command) -> None:
    [step] = Golden(GOLDEN, Path()).transcript("times")[name]
    assert encode_command(command, 1).hex() == step["send_hex"]
