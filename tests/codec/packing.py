"""A packer beside the oracle: steps to take, and what the file has to be then."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from datastreamer._codec import EntryBatch, scan
from datastreamer._packer import EntryPacker
from tests.codec.generated import data, event_kinds, kinds
from tests.oracle import PAGE, lay_out, pack

LARGEST = bytes(PAGE - 17)


def begun(
    total_length: int = 4096, total_entries: int = 0, spill_size: int = 4 << 20
) -> EntryPacker:
    packer = EntryPacker(spill_size)
    packer.begin(total_length, total_entries)
    return packer


def written(packer: EntryPacker) -> dict[int, bytes]:
    """The file's bytes by offset, as the segments say."""
    arena = packer.arena
    return {offset: bytes(arena[at : at + length]) for offset, at, length in packer.segments}


def joined(pieces: dict[int, bytes]) -> dict[int, bytes]:
    """Adjacent pieces of one page, joined."""
    whole: dict[int, bytes] = {}
    last = -1
    for offset, piece in pieces.items():
        if last >= 0 and offset == last + len(whole[last]) and (offset - 4096) % PAGE:
            whole[last] += piece
        else:
            last = offset
            whole[last] = piece
    return whole


def check(packer: EntryPacker, entries: list[tuple[int, bytes]], length: int, number: int) -> None:
    """The packer holds exactly `entries`, for a stream that ended at `length` and `number`."""
    pieces, end = lay_out(entries, length, number)
    assert written(packer) == joined(pieces)
    assert (packer.total_length, packer.next_number) == (end, number + len(entries))
    spans = b"".join(bytes(part) for _, part in packer.entry_parts())
    assert spans == b"".join(pack(number + i, *entry) for i, entry in enumerate(entries))
    assert packer.bookmarks == [
        (data, number + i)
        for i, (kind, data) in enumerate(entries)
        if kind == 0xB0 and 1 <= len(data) <= 16
    ]
    at = 0
    for offset, begin, size in packer.segments:
        assert begin == at
        assert size > 0
        assert (offset - 4096) // PAGE == (offset + size - 1 - 4096) // PAGE
        at += size
    assert at == len(packer.arena)


keys = st.binary(min_size=1, max_size=16)
places = st.one_of(
    st.sampled_from([4096, 4096 + PAGE, 4096 + 5 * PAGE - 1]),
    st.integers(1, 400).map(lambda before: 4096 + 9 * PAGE - before),
)
steps = st.one_of(
    st.tuples(st.just("add_entry"), event_kinds, data),
    st.tuples(st.just("add_bookmark"), keys),
    st.tuples(st.just("add_entries"), event_kinds, st.lists(data, max_size=5)),
    st.tuples(st.just("with types"), st.lists(st.tuples(event_kinds, data), max_size=5)),
    st.tuples(st.just("add_batch"), st.lists(st.tuples(kinds, data), max_size=5)),
    st.tuples(st.just("drain")),
)


def batch_of(entries: list[tuple[int, bytes]]) -> EntryBatch:
    return scan(b"".join(pack(50 + i, *entry) for i, entry in enumerate(entries)))


def do(packer: EntryPacker, step: Any) -> list[tuple[int, bytes]]:
    """Take the step; what it added."""
    first = packer.next_number
    match step:
        case "add_entry", kind, content:
            assert packer.add_entry(kind, content) == first
            return [(kind, content)]
        case "add_bookmark", key:
            assert packer.add_bookmark(key) == first
            return [(0xB0, key)]
        case "add_entries", kind, contents:
            assert packer.add_entries(kind, contents) == range(first, first + len(contents))
            return [(kind, content) for content in contents]
        case "with types", entries:
            types = [kind for kind, _ in entries]
            numbers = packer.add_entries(types, (content for _, content in entries))
            assert numbers == range(first, first + len(entries))
            return list(entries)
        case "add_batch", entries:
            assert packer.add_batch(batch_of(entries)) == range(first, first + len(entries))
            return list(entries)
    raise AssertionError(step)


# Every way to add something.
CALLS = [
    lambda p: p.add_entry(1, b""),
    lambda p: p.add_entry(1, bytearray()),
    lambda p: p.add_bookmark(b"k"),
    lambda p: p.add_entries(1, [b""]),
    lambda p: p.add_entries(1, []),
    lambda p: p.add_batch(batch_of([(1, b"")])),
    lambda p: p.add_batch(batch_of([])),
]
