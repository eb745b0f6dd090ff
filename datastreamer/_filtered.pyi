# The docstrings are in _filtered.pyx.

from collections.abc import Iterable
from typing import final

from _typeshed import ReadableBuffer

from datastreamer.selection.clauses import Clause, Selection

@final
class Choice:
    def __init__(self, where: Iterable[Clause]) -> None: ...
    @property
    def where(self) -> Selection: ...
    def gather(
        self,
        buffer: ReadableBuffer,
        number: int,
        *,
        file_offset: int,
        committed: int,
        stop: int,
        most_entries: int,
        most_bytes: int,
        alone: bool,
    ) -> tuple[int, int, int, bytes | None, int, bool, bool]: ...
