"""Which entries a scan needs, as far as its filters say.

Owns what filters say about the numbers of entries. Filters only narrow what is read: Spark applies
all of them. Numbers of blocks and batches narrow nothing: only convention makes them rise with the
entries, and a row that is missing is worse than a page that is read in vain.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final, NamedTuple

from datastreamer.format import U64_MAX
from datastreamer.spark.read.schemas import number_column


class NumberRange(NamedTuple):
    """A range of entry numbers, both ends included."""

    first: int = 0
    last: int = U64_MAX


ALL: Final = NumberRange()
"""All numbers that an entry can have."""


def wanted(table: str, filters: Iterable[Mapping[str, Any]]) -> NumberRange:
    """The entries that all of these filters together accept. A filter is a column and the least and
    greatest value that it accepts (None: no limit)."""
    first, last = ALL
    for each in filters:
        if each["column"] == number_column(table):
            first = first if each["least"] is None else max(first, each["least"])
            last = last if each["most"] is None else min(last, each["most"])
    return NumberRange(first, last)
