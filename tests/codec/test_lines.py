"""JSON lines made in C, beside those that Python makes."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from datastreamer._codec import pack_entry, scan
from datastreamer._lines import json_lines
from tests.codec.generated import kinds, pages, usual


@given(pages(), st.lists(kinds, max_size=3), st.booleans())
@usual
def test_a_line_an_entry(made: tuple[bytes, int, int], types: list[int], selected: bool) -> None:
    content, first, file_offset = made
    batch = scan(content, first, file_offset=file_offset)
    if selected:
        batch = batch.select(types + list(batch.types)[::2])
    expected = [
        json.dumps(
            {
                "number": entry.number,
                "type": entry.type,
                "length": len(entry.data),
                "data": f"0x{entry.data.hex()}",
            }
        )
        for entry in batch
    ]
    assert json_lines(batch).decode().splitlines() == expected
    assert json_lines(batch[1:]).decode().splitlines() == expected[1:]


def test_the_longest_line() -> None:
    data = bytes(range(256)) * 4095 + bytes(239)
    [line] = json_lines(scan(pack_entry(2**64 - 2, 2**32 - 1, data))).splitlines()
    assert json.loads(line) == {
        "number": 2**64 - 2,
        "type": 2**32 - 1,
        "length": 1_048_559,
        "data": f"0x{data.hex()}",
    }


def test_only_batches() -> None:
    with pytest.raises(TypeError, match="expected an EntryBatch, not list"):
        json_lines([])  # type: ignore[arg-type]
