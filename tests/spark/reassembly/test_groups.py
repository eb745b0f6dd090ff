"""Group by group the same comes out as of all messages at once, without Spark."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
from hypothesis import given, settings

from datastreamer.spark.reassembly.frames import BUDGET, _run
from tests.reassembly.generated import deliveries, subscriptions
from tests.reassembly.twin import records_of
from tests.spark.reassembly.event_rows import (
    Message,
    core_events,
    followed,
    in_order,
    placed,
    plain,
)


def homes(messages: list[Message]) -> dict[bytes, bytes]:
    """Each node's group, by joining sets."""
    found: dict[bytes, set[bytes]] = {}
    for key, value, _, _ in messages:
        if key[:1] in (b"\0", b"\xff") and len(value) % 37 == 0:
            for prefix, _ in records_of(value):
                one, other = (found.setdefault(own, {own}) for own in (key[:33], prefix))
                one |= other
                for own in one:
                    found[own] = one
    return {own: min(group) for own, group in found.items()}


@given(deliveries(), subscriptions)
@settings(max_examples=150, deadline=None)
def test_groups(made: Any, subscribe: Any) -> None:
    messages = in_order(placed(made))
    home = homes(messages)
    rows = [
        (home.get(message[0][:33], message[0][:33]), *message)
        for message in messages
        if followed(message[0], subscribe)
    ]
    rows.sort(key=lambda found: found[0])
    names = ["home", "key", "value", "source", "position"]
    types = [pa.binary(), pa.binary(), pa.binary(), pa.string(), pa.int64()]
    batches = []
    for at in range(0, len(rows), 7):
        columns = zip(*rows[at : at + 7], strict=True)
        arrays = [pa.array(column, of) for column, of in zip(columns, types, strict=True)]
        batches.append(pa.record_batch(arrays, names))
    reported = _run(iter(batches), subscribe, BUDGET)
    assert plain(reported) == plain(core_events(messages, subscribe))
