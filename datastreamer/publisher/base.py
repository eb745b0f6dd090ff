"""The part that all publishers have in common: what they know, and their operations.

How a call waits is in its face: `async_publisher` or `blocking_publisher`. Must not import trio.
"""

from __future__ import annotations

from datastreamer.protocol.publish.messages import Receipt
from datastreamer.protocol.publish.publisher import Outgoing, Underway
from datastreamer.publisher.engine import PublisherEngine


class PublisherBase:
    """The methods of a publisher that do not wait."""

    _engine: PublisherEngine

    @property
    def epoch(self) -> int:
        """The lease's epoch."""
        return self._engine.source.epoch

    @property
    def next_entry(self) -> int:
        """The number of the next operation's first entry."""
        return self._engine.source.next_entry

    @property
    def total_entries(self) -> int:
        """The number of entries on disk, by the server's last answer."""
        return self._engine.source.total_entries

    @property
    def first_unacknowledged(self) -> int | None:
        """The first entry of the first operation that has no receipt yet; None if all have."""
        underway = self._engine.source.underway
        return underway[0].first if underway else None

    @property
    def unacknowledged(self) -> int:
        """The number of committed operations that have no receipt yet."""
        return len(self._engine.source.underway)

    def give_up(self) -> None:
        """Make one last attempt to reconnect; calls that wait for a lost server raise its failure.

        A signal's handler may call it.
        """
        self._engine.retry_for = 0.0


class OperationBase(Outgoing):
    """An operation that is being made. It is in memory as a whole."""

    def __init__(self, engine: PublisherEngine) -> None:
        super().__init__(engine.first_of_next())
        self._engine = engine
        engine.open(self)

    def roll_back(self) -> None:
        """Discard it. Nothing of it was sent."""
        self._engine.roll_back(self)


class ReceiptBase:
    """An operation that was sent, and may not be on disk yet."""

    def __init__(self, engine: PublisherEngine, underway: Underway) -> None:
        self._engine = engine
        self._underway = underway

    @property
    def receipt(self) -> Receipt | None:
        """First entry, number of entries, and the stream's total then; None: not yet."""
        return self._underway.receipt
