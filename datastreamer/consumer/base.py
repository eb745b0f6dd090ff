"""The part that all reassemblies have in common: their state and metrics.

Must not import trio.
"""

from __future__ import annotations

from datastreamer.consumer.engine import ConsumerEngine
from datastreamer.consumer.state import SourceState
from datastreamer.errors import DatastreamerError
from datastreamer.metrics.exposition import Samples
from datastreamer.reassembly.checkpoint import Stats


class ReassemblyBase:
    """The methods of a reassembly that do not wait."""

    _engine: ConsumerEngine

    @property
    def stats(self) -> Stats:
        """The current `Stats` of the `Reassembler`."""
        return self._engine.state.stats

    @property
    def sources(self) -> dict[str, SourceState]:
        """The state of each upstream, by name."""
        return dict(self._engine.state.states)

    @property
    def oldest_seconds(self) -> float | None:
        """Seconds since the first message of the oldest incomplete payload, without the caller's
        own time; None if no payload is incomplete."""
        return self._engine.state.oldest_seconds(self._engine.now())

    @property
    def errors(self) -> dict[str, DatastreamerError]:
        """The errors of upstreams that are not read, by name."""
        return dict(self._engine.state.errors)

    @property
    def over(self) -> bool:
        """Whether all upstreams have ended and what they had was delivered."""
        return self._engine.over

    def samples(self) -> Samples:
        """The metrics' values."""
        return self._engine.state.samples(self._engine.now())
