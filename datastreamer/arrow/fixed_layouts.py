"""Where version 1's fixed layouts have the columns of a table.

Owns the form in which the compiled decoder receives them; `zkevm.fixed` owns the layouts.
"""

from __future__ import annotations

import re
import struct
from typing import Final, NamedTuple

from datastreamer.arrow.tables import Table
from datastreamer.zkevm import fixed

_VALUE: Final = re.compile("[0-9]*[A-Za-z?]")

Layout = tuple[int, int, int, tuple[tuple[int, int, int], ...]]


class FixedColumns(NamedTuple):
    """The columns of a table that version 1 has, their kinds, and the layouts to decode them."""

    names: tuple[str, ...]
    kinds: bytes
    layouts: tuple[Layout, ...]


def fixed_columns(table: Table) -> FixedColumns:
    """The arguments of `_columns.event_columns` for a table of version 1."""
    assert table.fixed_type is not None
    generations = fixed.GENERATIONS[table.fixed_type]
    here = {name: table.renamed.get(name, name) for name, _ in table.columns}
    had = {name for each in generations for name in (*each.fields, each.tail)}
    # The column of the whole data is not a field of any generation.
    names = tuple(name for name in here if here[name] in had or name == table.data_column)
    places = {here[name]: at for at, name in enumerate(names)}
    layouts = tuple(_layout(each, places) for each in generations)
    kinds = dict(table.columns)
    return FixedColumns(names, bytes(kinds[name] for name in names), layouts)


def _layout(generation: fixed.Generation, places: dict[str, int]) -> Layout:
    layout, fields, tail = generation
    values = _VALUE.findall(layout.format)
    slots, at, size_at = [], 0, -1
    for number, value in enumerate(values):
        width = struct.calcsize(f">{value}")
        if number < len(fields):
            slots.append((places[fields[number]], at, width))
        else:
            size_at = at
        at += width
    return layout.size, size_at, places[tail] if tail is not None else 0, tuple(slots)
