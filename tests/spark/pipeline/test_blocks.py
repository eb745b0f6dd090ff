"""Transactions find the blocks that they are in."""

from __future__ import annotations

import random
from typing import NamedTuple

import pyarrow as pa
import pytest

from datastreamer.spark.pipeline.transactions import BlocksOfRange


class Block(NamedTuple):
    number: int | None
    entry_number: int
    timestamp: int | None


def found(
    blocks: list[Block], transactions: list[tuple[int | None, int]], start: int, *, named: bool
) -> list[dict[str, int | None]]:
    columns = list(zip(*blocks, strict=True)) or [[], [], []]
    table = pa.table(
        {
            name: pa.chunked_array([pa.array(column, pa.int64())])
            for name, column in zip(Block._fields, columns, strict=True)
        }
    )
    numbers, entries = zip(*transactions, strict=True)
    made = BlocksOfRange(table, start, start + 60, named=named).of(
        pa.array(numbers, pa.int64()), pa.array(entries)
    )
    return pa.table(made).to_pylist()


def expected(
    blocks: list[Block], number: int | None, entry: int, *, named: bool
) -> dict[str, int | None]:
    own: list[Block] = [
        block
        for block in blocks
        if block.entry_number < entry
        and (not named or (block.number is not None and block.number == number))
    ]
    last = max(own, key=lambda block: block.entry_number, default=None)
    if last is None or last.number is None:
        last = None
    row = {
        "block_entry": last and last.entry_number,
        "timestamp": last and last.timestamp,
    }
    return row if named else {**row, "l2block_number": last and last.number}


@pytest.mark.parametrize("named", [True, False])
@pytest.mark.parametrize("seed", range(20))
def test_random_blocks(seed: int, named: bool) -> None:
    """Numbers that occur twice, in any order, and rows without one, where entries are lost."""
    chance = random.Random(seed)
    numbers = [None, 0, 1, 2, 3, 7, (1 << 63) - 1, -1]
    blocks, transactions = [], []
    begin = chance.choice([0, 10**12])
    for entry in range(begin, begin + 60):
        number = chance.choice(numbers)
        if chance.random() < 0.3:
            blocks.append(Block(number, entry, None if number is None else entry * 5))
        else:
            transactions.append((number, entry))
    chance.shuffle(blocks)
    chance.shuffle(transactions)
    rows = found(blocks, transactions, begin, named=named)
    assert rows == [expected(blocks, *each, named=named) for each in transactions]


@pytest.mark.parametrize("named", [True, False])
def test_no_blocks(named: bool) -> None:
    [row] = found([], [(1, 5)], 0, named=named)
    assert set(row.values()) == {None}
