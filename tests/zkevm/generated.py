"""Events of every kind, drawn by Hypothesis, and the protobuf library as an oracle."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from datastreamer.zkevm import events, fixed
from datastreamer.zkevm.schema import (
    BOOL,
    BYTES,
    DEBUG,
    ENUM,
    FULL_U64,
    MESSAGES,
    U32,
    U64,
    WEI,
    Field,
    Message,
)

u64 = st.integers(0, 2**64 - 1) | st.integers(0, 3)
u32 = st.integers(0, 2**32 - 1) | st.integers(0, 3)
u16 = st.integers(0, 2**16 - 1)
hash32 = st.binary(min_size=32, max_size=32)
address = st.binary(min_size=20, max_size=20)

_ENUMS = {"BookMark": events.BookmarkType, "BatchStart": events.BatchType}


def _values(message: str, field: Field) -> st.SearchStrategy[Any]:
    if field.kind == ENUM:
        known = st.sampled_from(list(_ENUMS[message]))
        others = st.integers(-(2**31), 2**31 - 1).filter(lambda n: n not in set(_ENUMS[message]))
        return known | others
    return {
        U64: u64,
        U32: u32,
        FULL_U64: u64,
        BOOL: st.booleans(),
        BYTES: st.binary(max_size=40),
        WEI: st.binary(max_size=18) | st.binary(max_size=15).map(bytes(3).__add__),
        DEBUG: st.none() | st.text(max_size=20),
    }[field.kind]


# Fields of higher numbers, and known numbers with another wire type.
_unknown = st.lists(st.sampled_from(["f80105", "820100", "0a0161", "0d00000000", "0b0c"]))


def _fields(message: Message) -> dict[str, st.SearchStrategy[Any]]:
    fields = {field.name: _values(message.name, field) for field in message.fields}
    if "unknown" in message.cls._fields:
        fields["unknown"] = _unknown.map("".join).map(bytes.fromhex)
    return fields


messages = {
    number: st.builds(getattr(events, message.name), **_fields(message))
    for number, message in MESSAGES.items()
}

_start = {"batch_number": u64, "number": u64, "timestamp": u64}
_start |= {"global_exit_root": hash32, "coinbase": address, "fork_id": u16}
none = st.none()


def _generation(**fields: st.SearchStrategy[Any]) -> st.SearchStrategy[fixed.StartL2Block]:
    names = ("delta_timestamp", "l1_infotree_index", "l1_blockhash", "chain_id", "l1_info_root")
    return st.builds(fixed.StartL2Block, **_start, **(dict.fromkeys(names, none) | fields))


starts = (
    _generation()
    | _generation(l1_blockhash=hash32)
    | _generation(l1_blockhash=hash32, l1_info_root=hash32)
    | _generation(delta_timestamp=u32, l1_infotree_index=u32, l1_blockhash=hash32, chain_id=u32)
)
layouts = {
    0xB0: st.builds(
        events.BookMark,
        st.sampled_from([events.BookmarkType.BATCH, events.BookmarkType.L2_BLOCK]),
        u64,
    ),
    1: starts,
    2: st.builds(fixed.L2Tx, st.integers(0, 255), st.booleans(), none | hash32, st.binary()),
    3: st.builds(fixed.EndL2Block, u64, hash32, hash32),
    4: st.builds(fixed.FixedUpdateGER, u64, u64, hash32, address, u16, none | u32, hash32),
}


def mutated(data: bytes, changes: list[tuple[int, int, int]]) -> bytes:
    """`data` with bytes replaced, left out and put in, at places that are taken modulo."""
    out = bytearray(data)
    for what, place, byte in changes:
        at = place % (len(out) + 1)
        if what == 0:
            out.insert(at, byte)
        elif at < len(out):
            if what == 1:
                out[at] = byte
            else:
                del out[at : at + byte % 4]
    return bytes(out)


changes = st.lists(
    st.tuples(st.integers(0, 2), st.integers(0, 400), st.integers(0, 255)), min_size=1, max_size=4
)
