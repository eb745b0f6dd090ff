"""The fixed layouts of every generation, byte for byte."""

from __future__ import annotations

import pytest

from datastreamer.zkevm.fixed import EndL2Block, FixedUpdateGER, L2Tx, StartL2Block


def test_start() -> None:
    event = StartL2Block(1, 2, 3, 4, 5, b"l" * 32, b"g" * 32, b"c" * 20, 9, 137)
    expected = "".join(
        [
            *("0000000000000001", "0000000000000002", "0000000000000003", "00000004", "00000005"),
            *("6c" * 32, "67" * 32, "63" * 20, "0009", "00000089"),
        ]
    )
    assert event.pack().hex() == expected
    assert len(event.pack()) == 122
    assert StartL2Block.unpack(event.pack()) == event


def test_transaction() -> None:
    packed = L2Tx(255, True, b"s" * 32, b"tx").pack()
    assert packed.hex() == "ff01" + "73" * 32 + "00000002" + "7478"
    assert L2Tx(7, False, None, b"tx").pack().hex() == "0700" + "00000002" + "7478"


def test_end() -> None:
    packed = EndL2Block(7, b"h" * 32, b"s" * 32).pack()
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
    assert len(event.pack()) in (78, 110, 142)
    assert event.pack().hex() == data
    assert StartL2Block.unpack(bytes.fromhex(data)) == event


@pytest.mark.parametrize("chain_id, shown", [(None, ""), (137, "00000089")])
def test_an_exit_root(chain_id: int | None, shown: str) -> None:
    event = FixedUpdateGER(1, 2, b"g" * 32, b"c" * 20, 9, chain_id, b"s" * 32)
    numbers = "00000000000000010000000000000002"
    assert event.pack().hex() == numbers + TAIL + shown + "73" * 32
    assert FixedUpdateGER.unpack(event.pack()) == event


@pytest.mark.parametrize("size", [0, 16, 77, 121, 200])
def test_what_is_no_start(size: int) -> None:
    with pytest.raises(ValueError, match=f"{size} bytes, but the layouts have 78, 110, 122, 142"):
        StartL2Block.unpack(bytes(size))
