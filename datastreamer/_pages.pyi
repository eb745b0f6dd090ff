# The docstrings are in _pages.pyx.

from collections.abc import Callable
from typing import final

from _typeshed import ReadableBuffer

def walk(
    buffer: ReadableBuffer,
    number: int,
    *,
    end: int | None = None,
    file_offset: int,
    max_entries: int | None = None,
) -> tuple[int, int]: ...
def entry_at(buffer: ReadableBuffer, number: int, *, start_number: int) -> tuple[int, int, int]: ...

@final
class PageTable:
    used: bool
    def __new__(cls, first_number: int, page_file_offset: int) -> PageTable: ...
    @property
    def first_number(self) -> int: ...
    @property
    def next_number(self) -> int: ...
    @property
    def page_file_offset(self) -> int: ...
    @property
    def end_offset(self) -> int: ...
    @property
    def full(self) -> bool: ...
    @property
    def nbytes(self) -> int: ...
    def extend(self, buffer: ReadableBuffer, file_offset: int) -> int: ...
    def find(self, number: int) -> tuple[int, int, int]: ...
    def read(
        self, number: int, read: Callable[[int, int], bytes], prefix: bytes, packet_type: int
    ) -> bytes | None: ...
    def read_event(
        self,
        number: int,
        key: bytes,
        read: Callable[[int, int], bytes],
        prefix: bytes,
        packet_type: int,
    ) -> bytes | None: ...
