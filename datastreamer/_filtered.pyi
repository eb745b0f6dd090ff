# The docstrings are in _filtered.pyx.

from collections.abc import Iterable
from typing import final

from _typeshed import ReadableBuffer

@final
class Choice:
    def __init__(self, types: Iterable[int]) -> None: ...
    @property
    def types(self) -> tuple[int, ...]: ...
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
