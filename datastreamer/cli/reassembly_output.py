"""The output of `reassemble`: payloads and events as lines, statistics as a table."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from datastreamer.cli.shared.console import text
from datastreamer.cli.shared.metrics_client import size
from datastreamer.cli.shared.output import json_line
from datastreamer.consumer.state import (
    Notice,
    SourceBack,
    SourceFailed,
    SourceLost,
    SourceRolledBack,
    SourceState,
)
from datastreamer.printable import json_text
from datastreamer.reassembly.checkpoint import Stats
from datastreamer.reassembly.events import Conflict, Dropped, Malformed, PayloadComplete
from datastreamer.reassembly.merge import Item, Payload
from datastreamer.reassembly.orderer import Applied, Block, Gap, Rejected, Reorg

if TYPE_CHECKING:
    import rich.console


def lines_of(item: Item) -> bytes:
    """What is delivered, as JSON lines: payloads as `split` accepts them, with their block if they
    are ordered. A reorg is a line with what is rolled back, newest first, then the payloads that
    are applied."""
    match item:
        case PayloadComplete():
            return _payload_line(item)
        case Applied():
            return _payload_line(item.payload, item.block)
        case Reorg():
            back = [
                {"number": block.number, "hash": _plain(block.hash), "id": _plain(payload.id)}
                for block, payload in item.rolled_back
            ]
            lines = [_payload_line(payload, block) for block, payload in item.applied]
            return b"".join([json_line({"rolled_back": back}), *lines])


def _payload_line(payload: PayloadComplete | Payload, block: Block | None = None) -> bytes:
    """A payload that an earlier run printed, and this one has not received again, has no parts."""
    complete = payload.complete if isinstance(payload, Payload) else payload
    line = f'{{"id": "0x{payload.id.hex()}"'
    if complete is not None:
        parts = [
            f'{{"key": "0x{key.hex()}", "value": "0x{value.hex()}"}}'
            for key, value in complete.parts
        ]
        line += f', "parts": [{", ".join(parts)}]'
    if block is not None:
        line += f', "block": {json_text(_block(block))}'
    return f"{line}}}\n".encode("ascii")


def _block(block: Block) -> dict[str, Any]:
    return {"number": block.number, "hash": _plain(block.hash), "parent": _plain(block.parent)}


def described(item: Item) -> bytes:
    """What is delivered, as lines for people."""
    match item:
        case PayloadComplete():
            return _described(item)
        case Applied():
            return _described(item.payload, item.block)
        case Reorg():
            first, last = item.rolled_back[-1][0].number, item.rolled_back[0][0].number
            which = f"block {first}" if first == last else f"blocks {last} to {first}"
            lines = [_described(payload, block) for block, payload in item.applied]
            return b"".join([f"rolled back: {which}\n".encode(), *lines])


def _described(payload: PayloadComplete | Payload, block: Block | None = None) -> bytes:
    number = "" if block is None else f"{block.number:>12,}  "
    complete = payload.complete if isinstance(payload, Payload) else payload
    if complete is None:
        return f"{number}0x{payload.id.hex()}  printed by an earlier run\n".encode()
    amount = sum(len(key) + len(value) for key, value in complete.parts)
    return (
        f"{number}0x{payload.id.hex()}  {len(complete.parts):>7,} parts  {size(amount):>10}  "
        f"{complete.source}\n"
    ).encode("utf-8", "replace")


_FIELDS: dict[type, tuple[str, ...]] = {
    Conflict: ("conflict", "what", "key", "prefix", "payload", "source", "position"),
    Malformed: ("malformed", "key", "reason", "source", "position"),
    Dropped: (
        *("dropped", "why", "payload", "prefix", "messages", "bytes", "missing"),
        "positions",
    ),
    Gap: ("gap", "missing", "number", "block", "source"),
    Rejected: ("rejected", "why", "block", "payload"),
    SourceLost: ("source_lost", "source", "error"),
    SourceFailed: ("source_failed", "source", "error", "again"),
    SourceBack: ("source_back", "source", "next_entry"),
}


def event_line(event: Notice) -> str:
    """Another event as a line of JSON."""
    if isinstance(event, SourceRolledBack):
        rollback = event.rollback
        line = {
            "event": "source_rolled_back",
            "source": event.source,
            "to_entry": rollback.to_entry,
            "from_entry": rollback.from_entry,
        }
    else:
        name, *fields = _FIELDS[type(event)]
        line = {"event": name, **{field: _plain(getattr(event, field)) for field in fields}}
    return json_text(line)


def _plain(value: Any) -> Any:
    if isinstance(value, bytes):
        return f"0x{value.hex()}"
    if isinstance(value, Block):
        return _block(value)
    if isinstance(value, Payload):
        return _plain(value.id)
    return dict(value) if isinstance(value, Mapping) else value


def stats_line(stats: Stats, states: Mapping[str, SourceState], age: float | None) -> str:
    """The statistics as a line of JSON; `age` is that of the oldest incomplete payload."""
    return json_text(
        {
            "event": "stats",
            "in_flight": stats.in_flight,
            "complete": stats.completed,
            "dropped": stats.dropped,
            "messages": stats.messages,
            "bytes": stats.message_bytes,
            "oldest_seconds": None if age is None else round(age, 3),
            "sources": {
                name: {"state": state.value, **_counts(stats, name)}
                for name, state in states.items()
            },
        }
    )


_COUNTS = ("received", "duplicates", "conflicts", "malformed", "outside")


def _counts(stats: Stats, name: str) -> dict[str, int]:
    counts = stats.sources.get(name)
    return {field: 0 if counts is None else getattr(counts, field) for field in _COUNTS}


def stats_table(
    stats: Stats, states: Mapping[str, SourceState], age: float | None
) -> rich.console.RenderableType:
    """The same as a table: the totals, and a row for each source."""
    from rich import box
    from rich.console import Group
    from rich.table import Table

    first = (
        f"{stats.completed:,} complete   {stats.in_flight:,} in flight "
        f"({stats.messages:,} messages, {size(stats.message_bytes)})   {stats.dropped:,} dropped"
    )
    oldest = "oldest incomplete: " + ("none" if age is None else f"{age:,.1f} s")
    made = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    made.add_column("source", no_wrap=True)
    made.add_column("state", no_wrap=True)
    for title in _COUNTS:
        made.add_column(title, justify="right", no_wrap=True)
    for name, state in states.items():
        counts = _counts(stats, name).values()
        made.add_row(text(name), state.value, *(f"{count:,}" for count in counts))
    return Group(text(first), text(oldest), made)
