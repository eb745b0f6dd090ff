"""What all reassemblies have in common: what they know of themselves.

Must not import trio.
"""

from __future__ import annotations

from datastreamer.consumer.consumption import SourceState
from datastreamer.consumer.engine import ConsumerEngine
from datastreamer.errors import DatastreamerError
from datastreamer.metrics.exposition import Samples
from datastreamer.reassembly.checkpoint import Stats


class ReassemblyFace:
    """The part of a reassembly that waits for nothing."""

    _engine: ConsumerEngine

    @property
    def stats(self) -> Stats:
        """As `Reassembler.stats`, now."""
        return self._engine.consumption.stats

    @property
    def sources(self) -> dict[str, SourceState]:
        """The state of each upstream, by name."""
        return dict(self._engine.consumption.states)

    @property
    def oldest_seconds(self) -> float | None:
        """The age of the oldest incomplete payload, since its first message, without the
        caller's own time; None: none is incomplete."""
        return self._engine.consumption.oldest_seconds(self._engine.now())

    @property
    def errors(self) -> dict[str, DatastreamerError]:
        """Why upstreams are not read any more, by name."""
        return dict(self._engine.consumption.errors)

    @property
    def over(self) -> bool:
        """Whether all upstreams have ended and what they had was delivered."""
        return self._engine.over

    def samples(self) -> Samples:
        """The metrics' values."""
        return self._engine.consumption.samples(self._engine.now())
