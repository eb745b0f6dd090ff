"""Compares remembered entries with those that a server holds, by a reading of its own.

Owns which entries that reading requests: those of the remembered selection, whatever is streamed.
"""

from __future__ import annotations

from typing import TypeAlias

from datastreamer._codec import EntryBatch
from datastreamer.errors import BadFromEntry
from datastreamer.format import MAX_CLAUSES
from datastreamer.protocol.batches import BatchLimits, BatchReading, asked_for, probe, truncated
from datastreamer.protocol.client import ClientConnection
from datastreamer.protocol.exchanges import Exchange, Streaming
from datastreamer.protocol.history import Trail
from datastreamer.selection.clauses import Selection, normal, within

Reading: TypeAlias = Streaming | BatchReading


def filter_of(connection: ClientConnection, where: Selection | None) -> Exchange[Selection | None]:
    """What this server should select; None if it should send all."""
    if not where or len(within(where)) > MAX_CLAUSES:
        return None
    return asked_for((yield from probe(connection)), where)


def difference(trail: Trail, batch: EntryBatch) -> int | None:
    """The first entry in the range of `batch`, which is remembered, that differs; `batch` may hold
    others too."""
    return trail.first_difference(_selected(batch, trail))


def compare(
    connection: ClientConnection, trail: Trail, until: int, fresh: Trail | None = None
) -> Exchange[int | None]:
    """The first entry before `until` that differs from the remembered ones; None if all are equal.

    What is equal extends `fresh`, a trail of another selection, if the server sends all of that.
    """
    at, differing = trail.first_number, None
    chosen = yield from filter_of(connection, trail.where)
    reading: Reading = Streaming(at, until)
    if chosen or (connection.capabilities is not None and connection.capabilities.batch_reads):
        reading = BatchReading(at, until, BatchLimits(), chosen)
    try:
        yield from reading.begin(connection)
    except BadFromEntry as error:
        raise truncated(connection) from error
    while at < until and differing is None:
        batch = yield from reading.advance()
        assert batch is not None, "it ends at `until`"
        part = batch.before(until)
        differing = difference(trail, part)
        if fresh is not None and (chosen is None or _covers(chosen, fresh.where)):
            same = part if differing is None else part.before(differing)
            fresh.extend(_selected(same, fresh))
        at = batch.next_number
    yield from reading.end(None)
    return differing


def _covers(wide: Selection, narrow: Selection | None) -> bool:
    """Whether the first selection has all entries of the second one (None: of the stream)."""
    return narrow is not None and normal((*wide, *narrow)) == wide


def _selected(batch: EntryBatch, trail: Trail) -> EntryBatch:
    return batch if trail.where is None else batch.select(trail.where)
