"""Generated runs of entries, as Hypothesis strategies, and ways to damage them."""

from __future__ import annotations

from array import array

from hypothesis import settings
from hypothesis import strategies as st

from tests.oracle import PAGE, lay_out, pack

# No deadlines: a sanitized build on a busy machine may take its time.
usual = settings(deadline=None)
thorough = settings(max_examples=200, deadline=None)

U32 = 2**32 - 1
U64 = 2**64 - 1

kinds = st.one_of(st.sampled_from([0, 1, 2, 0xAF, 0xB0, 0xB1, U32]), st.integers(0, U32))
event_kinds = kinds.filter(lambda kind: kind != 0xB0)
numbers = st.one_of(st.integers(0, 300), st.integers(0, U64 - 1000))
data = st.one_of(st.binary(max_size=60), st.sampled_from([b"", b"\0", b"\2" * 17, b"x" * 300]))


def exactly(content: bytes) -> array[int]:
    """`content` in memory without a byte to spare (bytes end with one, unseen), so that a
    sanitizer sees each read behind it."""
    return array("B", content)


@st.composite
def wires(draw: st.DrawFn) -> tuple[bytes, int]:
    """Entries as on the wire, and the first one's number."""
    first = draw(numbers)
    entries = draw(st.lists(st.tuples(kinds, data), max_size=8))
    return b"".join(pack(first + i, *entry) for i, entry in enumerate(entries)), first


@st.composite
def pages(draw: st.DrawFn) -> tuple[bytes, int, int]:
    """Bytes of a file around the end of a page, the first number and the file offset."""
    first = draw(numbers)
    before_end = draw(st.integers(1, 250))
    file_offset = 4096 + draw(st.sampled_from([1, 2, 77])) * PAGE - before_end
    entries = draw(st.lists(st.tuples(kinds, data), max_size=10))
    pieces, total = lay_out(entries, file_offset, first)
    stale = draw(st.binary(min_size=1, max_size=9))
    filled = bytearray((stale * (total - file_offset))[: total - file_offset])
    for offset, piece in pieces.items():
        filled[offset - file_offset : offset - file_offset + len(piece)] = piece
    return bytes(filled), first, file_offset


def _edit(draw: st.DrawFn, content: bytearray) -> None:
    at = draw(st.integers(0, len(content)))
    match draw(st.sampled_from(["cut", "byte", "length", "insert", "remove", "repeat"])):
        case "cut":
            del content[at:]
        case "byte":
            if at < len(content):
                content[at] = draw(st.sampled_from([0, 1, 2, 3, 0x7F, 0xFE, 0xFF]))
        case "length":
            # Where a head begins, most likely: its length is then what was drawn.
            if 2 in content[at:]:
                at = content.index(2, at)
            value = draw(st.sampled_from([0, 16, 17, 18, 100, PAGE, PAGE + 1, 2**31, U32]))
            content[at + 1 : at + 5] = value.to_bytes(4, "big")
        case "insert":
            content[at:at] = draw(st.binary(max_size=20))
        case "remove":
            del content[at : at + draw(st.integers(1, 20))]
        case "repeat":
            content[at:at] = content[at : at + draw(st.integers(1, 40))]


@st.composite
def damaged(draw: st.DrawFn, content: bytes) -> bytes:
    """`content` after up to three edits."""
    edited = bytearray(content)
    for _ in range(draw(st.integers(1, 3))):
        _edit(draw, edited)
    return bytes(edited)
