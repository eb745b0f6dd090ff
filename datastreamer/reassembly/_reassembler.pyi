# The docstrings of _reassembler.pyx describe this class.

from collections.abc import Iterable, Iterator
from typing import final

from _typeshed import ReadableBuffer

from datastreamer._codec import EntryBatch
from datastreamer.reassembly._memory import Ledger
from datastreamer.reassembly.checkpoint import Checkpoint
from datastreamer.reassembly.events import Event

@final
class Reassembler(Ledger):
    def __init__(
        self,
        subscribe: Iterable[bytes] | None = None,
        *,
        reorg_threshold: int = 1000,
        budget: int = ...,
        max_age: float | None = 600.0,
        resume: Checkpoint | None = None,
    ) -> None: ...
    def receive(
        self,
        key: ReadableBuffer,
        value: ReadableBuffer,
        source: str = "",
        position: int | None = None,
        now: float | None = None,
    ) -> tuple[Event, ...]: ...
    def receive_batch(
        self, batch: EntryBatch, source: str = "", *, type: int = 0x10, now: float | None = None
    ) -> Iterator[Event]: ...
