from collections.abc import Sequence
from typing import Protocol, TypeAlias

from datastreamer._packer import EntryPacker
from datastreamer.storage.disk._placement import Placement, Placer

Buffer: TypeAlias = bytes | bytearray | memoryview

class CommitFile(Protocol):
    def commit(
        self,
        packer: EntryPacker,
        page: Buffer,
        before: tuple[int, int],
        after: tuple[int, int],
        sync: bool,
        wakers: Sequence[int],
    ) -> None: ...

class EntriesNotWritten(OSError): ...

class Descriptor(CommitFile):
    _fd: int
    _placer: Placer | None
    def __init__(self, fd: int) -> None: ...
    def place(self, arena: Buffer, segments: Sequence[tuple[int, int, int]]) -> Placement: ...
