# The docstrings of _at_hand.pyx say the contracts.

from datastreamer.storage.bookmarks.builder import IndexBuilder
from datastreamer.storage.bookmarks.trust import TrustedIndex
from datastreamer.storage.header.records import Head

class NotAtHandError(Exception): ...

class LookUpsAtHand:
    def __init__(
        self,
        trusted: TrustedIndex,
        builder: IndexBuilder,
        memory: dict[bytes, int],
        indexed: Head,
        state: object,
    ) -> None: ...
    def hold_at(self, state: object) -> bool: ...
    def newest(self, key: bytes) -> int | None: ...
    def end(self) -> None: ...
