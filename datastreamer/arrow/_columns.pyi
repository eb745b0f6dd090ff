# The contracts stand in the docstrings of _columns.pyx.

from typing import Literal, overload

from datastreamer._codec import EntryBatch

@overload
def entry_columns(batch: EntryBatch) -> tuple[bytes, bytes, bytes, bytes]: ...
@overload
def entry_columns(
    batch: EntryBatch, *, data: bool
) -> tuple[bytes, bytes, bytes | None, bytes | None]: ...
def message_columns(
    batch: EntryBatch, type: int, kinds: bytes, wanted: bytes, bad_rows: Literal[0, 1, 2]
) -> tuple[
    int,
    bytes,
    list[tuple[bytes] | tuple[bytes, bytes, bytes | None] | None],
    bytes | None,
    list[tuple[int, int]],
]: ...
