# The docstrings of _at_hand.pyx say the contracts.

from collections.abc import Container
from typing import Protocol, final

from datastreamer._pages import PageTable
from datastreamer.storage.disk._commit import Descriptor

class Pages(Protocol):
    @property
    def states(self) -> bytearray: ...
    def needs(self, page: int) -> bool: ...

@final
class ReadsAtHand:
    def __new__(cls, file: Descriptor, pages: Pages | None) -> ReadsAtHand: ...
    def packed(
        self,
        tables: list[PageTable],
        total: int,
        pages: Container[int],
        number: int,
        prefix: bytes,
        packet_type: int,
        key: bytes | None = None,
    ) -> bytes | None: ...
