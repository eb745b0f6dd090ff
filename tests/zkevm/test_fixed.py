"""The fixed layouts, newest generation, byte for byte."""

from __future__ import annotations

import pytest

from datastreamer.zkevm.fixed import EndL2Block, L2Tx, StartL2Block, started


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
    assert started(event.pack()) == (1, 2)


def test_transaction() -> None:
    packed = L2Tx(255, 1, b"s" * 32, b"tx").pack()
    assert packed.hex() == "ff01" + "73" * 32 + "00000002" + "7478"


def test_end() -> None:
    packed = EndL2Block(7, b"h" * 32, b"s" * 32).pack()
    assert packed.hex() == "0000000000000007" + "68" * 32 + "73" * 32
    assert len(packed) == 72


@pytest.mark.parametrize("size", [78, 110, 122, 142])
def test_a_start_of_every_generation(size: int) -> None:
    numbers = (5).to_bytes(8, "big") + (6).to_bytes(8, "big")
    assert started(numbers + bytes(size - 16)) == (5, 6)


@pytest.mark.parametrize("size", [0, 16, 77, 121, 200])
def test_what_is_no_start(size: int) -> None:
    assert started(bytes(size)) is None
