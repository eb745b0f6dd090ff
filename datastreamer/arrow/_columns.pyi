# The docstrings of _columns.pyx describe these functions.

from collections.abc import Callable, Sequence
from typing import Any, Literal

from datastreamer._codec import EntryBatch

def entry_columns(
    batch: EntryBatch, allocate: Callable[[int], Any], *, data: bool = True
) -> tuple[bytes, bytes, bytes | None, Any]: ...
def event_columns(
    batch: EntryBatch,
    type: int,
    kinds: bytes,
    wanted: bytes,
    bad_rows: Literal[0, 1, 2],
    allocate: Callable[[int], Any],
    layouts: Sequence[tuple[int, int, int, Sequence[tuple[int, int, int]]]] | None = None,
) -> tuple[
    int,
    bytes,
    list[tuple[list[Any], bytes | None] | None],
    bytes | None,
    list[tuple[int, int]],
]: ...
