"""How a reassembly is, told the same way under Trio and in plain synchronous code.

Must not import trio.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

from datastreamer.errors import DatastreamerError
from datastreamer.metrics.exposition import Samples
from datastreamer.reassembly.checkpoint import Stats

if TYPE_CHECKING:
    from datastreamer.consumer.consumption import Consumption, SourceState


class Observed(ABC):
    """How a consumption is, for whoever looks at it."""

    _consumption: Consumption

    @abstractmethod
    def _now(self) -> float:
        """The time, by the clock that the consumption is told of."""

    @property
    def stats(self) -> Stats:
        """As `Reassembler.stats`, now."""
        return self._consumption.stats

    @property
    def sources(self) -> dict[str, SourceState]:
        """How each upstream is, by name."""
        return dict(self._consumption.states)

    @property
    def oldest_seconds(self) -> float | None:
        """How long ago the first message came of the oldest that is not whole, the caller's own
        time left out; None: nothing is in flight."""
        return self._consumption.oldest_seconds(self._now())

    @property
    def errors(self) -> dict[str, DatastreamerError]:
        """Why upstreams are not read any more, by name."""
        return dict(self._consumption.errors)

    def samples(self) -> Samples:
        """The metrics' values."""
        return self._consumption.samples(self._now())
