"""Which entries a query needs: by number and type, by block and batch.

Owns what Spark's filters say about a stream, and which of them the reader applies completely.
Must not know files or servers.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Final, NamedTuple

from pyspark.sql.datasource import (
    EqualNullSafe,
    EqualTo,
    Filter,
    GreaterThan,
    GreaterThanOrEqual,
    In,
    LessThan,
    LessThanOrEqual,
)

from datastreamer.arrow.tables import ENTRIES
from datastreamer.format import U32_MAX, U64_MAX
from datastreamer.spark.read.schemas import number_column
from datastreamer.zkevm.bookmark_keys import Kind

_EQUAL: Final = EqualTo | EqualNullSafe | In
_BELOW: Final = LessThan | LessThanOrEqual
_ABOVE: Final = GreaterThan | GreaterThanOrEqual

# Columns whose numbers rise with the entry numbers: (table, column) -> what they number.
_RISING: Final[dict[tuple[str, str], Kind]] = {
    ("blocks", "number"): "block",
    ("blocks", "batch_number"): "batch",
    ("block_ends", "number"): "block",
    ("transactions", "l2block_number"): "block",
    ("batches", "number"): "batch",
    ("batch_ends", "number"): "batch",
}


class NumberRange(NamedTuple):
    """A range of integers, both ends included."""

    first: int = 0
    last: int = U64_MAX

    def __and__(self, other: NumberRange) -> NumberRange:
        return NumberRange(max(self.first, other.first), min(self.last, other.last))

    @property
    def empty(self) -> bool:
        return self.first > self.last


ALL: Final = NumberRange()
"""All numbers that an entry, a block or a batch can have."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """The entries that a query needs.

    `types` are entry types (None: all); `blocks` and `batches` are those that the events belong
    to.
    """

    entries: NumberRange = ALL
    types: frozenset[int] | None = None
    blocks: NumberRange = ALL
    batches: NumberRange = ALL

    @property
    def start(self) -> int:
        """The first entry."""
        return self.entries.first

    @property
    def stop(self) -> int:
        """The entry after the last one."""
        return self.entries.last + 1

    @property
    def empty(self) -> bool:
        """Whether no entry is within the bounds."""
        none = self.types is not None and not self.types
        return none or self.entries.empty or self.blocks.empty or self.batches.empty

    def within(self, start: int, stop: int) -> Bounds:
        """These bounds, limited to the entries from `start` up to, not including, `stop`."""
        return replace(self, entries=self.entries & NumberRange(start, stop - 1))


def split_filters(table: str, filters: Iterable[Filter]) -> tuple[Bounds, list[Filter]]:
    """The bounds that the filters imply, and the filters that Spark still has to apply.

    Filters on entry numbers and types are applied completely. Filters on blocks and batches only
    limit what is read, so Spark applies them too.
    """
    bounds, rest = Bounds(), []
    for wanted in filters:
        column, values = _wanted(wanted)
        if column is None or values is None:
            rest.append(wanted)
        elif column == number_column(table):
            bounds = replace(bounds, entries=bounds.entries & _around(values))
            if not isinstance(values, NumberRange) and len(values) > 1:
                rest.append(wanted)
        elif (table, column) == (ENTRIES, "type") and not isinstance(values, NumberRange):
            kinds = frozenset(value for value in values if 0 <= value <= U32_MAX)
            bounds = replace(
                bounds, types=kinds & (kinds if bounds.types is None else bounds.types)
            )
        elif (table, column) in _RISING:
            of_blocks = _RISING[table, column] == "block"
            part = bounds.blocks if of_blocks else bounds.batches
            part &= _around(values)
            bounds = replace(bounds, blocks=part) if of_blocks else replace(bounds, batches=part)
            rest.append(wanted)
        else:
            rest.append(wanted)
    return bounds, rest


def _wanted(wanted: Filter) -> tuple[str | None, NumberRange | frozenset[int] | None]:
    """The column of a filter and the values that it accepts; None for the values if they are not
    integers."""
    if not isinstance(wanted, _EQUAL | _BELOW | _ABOVE):
        return None, None
    column = wanted.attribute[0] if len(wanted.attribute) == 1 else None
    values = wanted.value if isinstance(wanted, In) else (wanted.value,)
    if any(type(value) is not int for value in values):
        return column, None
    if isinstance(wanted, _EQUAL):
        return column, frozenset(values)
    (value,) = values
    if isinstance(wanted, _BELOW):
        return column, NumberRange(last=value - isinstance(wanted, LessThan))
    return column, NumberRange(first=max(0, value + isinstance(wanted, GreaterThan)))


def _around(values: NumberRange | frozenset[int]) -> NumberRange:
    if isinstance(values, NumberRange):
        return values
    return NumberRange(max(0, min(values)), max(values)) if values else NumberRange(1, 0)
