"""The fixed layouts of every generation, byte for byte."""

from __future__ import annotations

from typing import Any

import pytest

from datastreamer.errors import DecodeFailed
from datastreamer.zkevm import EndL2Block, FixedUpdateGER, L2Tx, StartL2Block, decode_data, encode


def pack(event: Any) -> bytes:
    return encode(event, version=1)[1]


def unpack(type: int, data: bytes) -> Any:
    return decode_data(type, data, version=1)


def test_start() -> None:
    event = StartL2Block(1, 2, 3, 4, 5, b"l" * 32, b"g" * 32, b"c" * 20, 9, 137)
    expected = "".join(
        [
            *("0000000000000001", "0000000000000002", "0000000000000003", "00000004", "00000005"),
            *("6c" * 32, "67" * 32, "63" * 20, "0009", "00000089"),
        ]
    )
    assert pack(event).hex() == expected
    assert len(pack(event)) == 122
    assert unpack(1, pack(event)) == event


def test_transaction() -> None:
    packed = pack(L2Tx(255, True, b"s" * 32, b"tx"))
    assert packed.hex() == "ff01" + "73" * 32 + "00000002" + "7478"
    assert pack(L2Tx(7, False, None, b"tx")).hex() == "0700" + "00000002" + "7478"


def test_end() -> None:
    packed = pack(EndL2Block(7, b"h" * 32, b"s" * 32))
    assert packed.hex() == "0000000000000007" + "68" * 32 + "73" * 32
    assert len(packed) == 72


NUMBERS = "000000000000000100000000000000020000000000000003"
TAIL = "67" * 32 + "63" * 20 + "0009"


@pytest.mark.parametrize(
    "data, event",
    [
        (
            NUMBERS + TAIL,
            StartL2Block(1, 2, 3, None, None, None, b"g" * 32, b"c" * 20, 9, None),
        ),
        (
            NUMBERS + "6c" * 32 + TAIL,
            StartL2Block(1, 2, 3, None, None, b"l" * 32, b"g" * 32, b"c" * 20, 9, None),
        ),
        (
            NUMBERS + "6c" * 32 + "67" * 32 + "69" * 32 + "63" * 20 + "0009",
            StartL2Block(1, 2, 3, None, None, b"l" * 32, b"g" * 32, b"c" * 20, 9, None, b"i" * 32),
        ),
    ],
)
def test_a_start_of_older_generations(data: str, event: StartL2Block) -> None:
    assert len(pack(event)) in (78, 110, 142)
    assert pack(event).hex() == data
    assert unpack(1, bytes.fromhex(data)) == event


@pytest.mark.parametrize("chain_id, shown", [(None, ""), (137, "00000089")])
def test_an_exit_root(chain_id: int | None, shown: str) -> None:
    event = FixedUpdateGER(1, 2, b"g" * 32, b"c" * 20, 9, chain_id, b"s" * 32)
    numbers = "00000000000000010000000000000002"
    assert pack(event).hex() == numbers + TAIL + shown + "73" * 32
    assert unpack(4, pack(event)) == event


@pytest.mark.parametrize("size", [0, 16, 77, 121, 200])
def test_what_is_no_start(size: int) -> None:
    with pytest.raises(DecodeFailed, match=f"{size} bytes, but the layouts have 78, 110, 122, 142"):
        unpack(1, bytes(size))
