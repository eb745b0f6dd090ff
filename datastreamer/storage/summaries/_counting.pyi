# The docstring is in _counting.pyx.

from collections.abc import Sequence

from _typeshed import ReadableBuffer

def count(
    content: ReadableBuffer, end: int, fields: Sequence[tuple[int, int]], most_types: int
) -> tuple[int, bool, tuple[int, ...], tuple[tuple[int, int], ...] | None] | None: ...
