"""The newest batch and block of a stream, found by reading back from its end."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, NamedTuple, Protocol

from datastreamer._codec import EntryBatch
from datastreamer.errors import DecodeFailed
from datastreamer.format import Header
from datastreamer.zkevm import events, fixed
from datastreamer.zkevm.decoding import Event, decode_data
from datastreamer.zkevm.schema import FIRST_BLOCK_END_VERSION, TYPE_BOOK_MARK

# Entries per read.
_LOOK_BACK: Final = 4096


class EntrySource(Protocol):
    """The methods of `datastreamer.DataStream` that are used here."""

    @property
    def header(self) -> Header: ...
    @property
    def total_entries(self) -> int: ...
    def batches(self, start: int = 0, stop: int | None = None) -> Iterator[EntryBatch]: ...


class SequencerState(NamedTuple):
    """The newest batch and block of a stream; None if it has none."""

    batch: int | None = None
    # Whether that batch has not ended; batches of version 1 have no end.
    batch_open: bool = False
    block: int | None = None
    timestamp: int = 0
    state_root: bytes = b""
    # Whether blocks have an L2BlockEnd.
    block_ends: bool = False


def latest_state(stream: EntrySource) -> SequencerState:
    """Read back from the stream's end to its newest batch and block."""
    version = stream.header.version
    state = SequencerState(block_ends=version >= FIRST_BLOCK_END_VERSION)
    batch_known = False
    stop = stream.total_entries
    while stop and not (batch_known and state.block is not None):
        start = max(0, stop - _LOOK_BACK)
        for _, event in reversed(list(_events(stream, start, stop))):
            if isinstance(event, events.L2BlockEnd) and state.block is None:
                state = state._replace(block_ends=True)
            elif isinstance(event, events.L2Block) and state.block is None:
                state = state._replace(
                    block=event.number, timestamp=event.timestamp, state_root=event.state_root
                )
            elif isinstance(event, events.BatchStart | events.BatchEnd) and not batch_known:
                batch_known = True
                is_open = isinstance(event, events.BatchStart)
                state = state._replace(batch=event.number, batch_open=is_open)
            elif isinstance(event, fixed.StartL2Block) and state.block is None:
                batch_known = True
                state = state._replace(
                    batch=event.batch_number, block=event.number, timestamp=event.timestamp
                )
            if batch_known and state.block is not None:
                break
        stop = start
    return state


def _events(stream: EntrySource, start: int, stop: int) -> Iterator[tuple[int, Event]]:
    """The events of a range; entries that are no events are skipped."""
    version = stream.header.version
    for batch in stream.batches(start, stop):
        for at, kind in enumerate(batch.types):
            if kind != TYPE_BOOK_MARK:
                try:
                    data = bytes(batch.data(at))
                    yield batch.first_number + at, decode_data(kind, data, version=version)
                except DecodeFailed:
                    continue
