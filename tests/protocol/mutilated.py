"""What clients have sent in the recorded conversations, and what may become of it."""

from __future__ import annotations

from pathlib import Path

from hypothesis import strategies as st

from datastreamer.protocol.commands import (
    BatchQuery,
    BookmarkQuery,
    CapabilitiesQuery,
    CommitStart,
    EntryQuery,
    FilteredRead,
    FilteredStart,
    FilteredStartBookmark,
    FollowStart,
    HashQuery,
    HeaderQuery,
    KnownHistory,
    MarksQuery,
    RangeQuery,
    Start,
    StartBookmark,
    Stop,
    SumsQuery,
    TimeQuery,
    encode_command,
)
from tests.conftest import GOLDEN, Golden

TYPE = 1


def recorded() -> list[bytes]:
    """What clients have sent in the recorded conversations; a handful where there are none."""
    found = {
        encode_command(command, TYPE)
        for command in (
            HeaderQuery(),
            EntryQuery(7),
            BookmarkQuery(b"key"),
            Start(0),
            CommitStart(7),
            StartBookmark(b"0123456789abcdef"),
            Stop(),
            CapabilitiesQuery(),
            BatchQuery(7, 100, 1 << 20, 5000),
            RangeQuery(b"key", b"0123456789abcdef"),
            FilteredRead(7, (1, 2), 99, 100, 1 << 20, 5000),
            FilteredRead(0, tuple(range(64))),
            FilteredStart(0, (0xB0,)),
            FilteredStartBookmark(b"key", (1, 2, 3)),
            FollowStart(7, KnownHistory(b"stream id of 16.", 8)),
            HashQuery(7, 99, 1 << 20),
            SumsQuery(7, 4096),
            TimeQuery(1_795_935_600_000),
            MarksQuery(7),
        )
    }
    golden = Golden(GOLDEN, Path())
    for server in ("reference", "older", "fork"):
        for steps in golden.transcript(server).values():
            found.update(bytes.fromhex(step.get("send_hex") or "") for step in steps)
    return sorted(data for data in found if data and len(data) < 4096)


RECORDED = recorded()


@st.composite
def mutilated(draw: st.DrawFn) -> bytes:
    """Recorded commands one after the other: bytes changed, cut out, doubled, put in."""
    data = bytearray(b"".join(draw(st.lists(st.sampled_from(RECORDED), min_size=1, max_size=6))))
    for _ in range(draw(st.integers(0, 6))):
        at = draw(st.integers(0, len(data)))
        size = draw(st.sampled_from([1, 1, 2, 4, 8, 16, 40]))
        match draw(st.integers(0, 4)):
            case 0:
                data[at : at + size] = draw(st.binary(min_size=size, max_size=size))
            case 1:
                del data[at : at + size]
            case 2:
                data[at:at] = data[at : at + size]
            case 3:
                data[at : at + size] = (
                    bytes([draw(st.sampled_from([0, 1, 0x7F, 0x80, 0xFF]))]) * size
                )
            case _:
                data[at:at] = draw(st.binary(max_size=size))
    return bytes(data)
