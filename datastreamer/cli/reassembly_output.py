"""The output of `reassemble`: payloads and events as lines, statistics as a table."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from datastreamer.cli.shared.console import text
from datastreamer.cli.shared.metrics_client import size
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

if TYPE_CHECKING:
    import rich.console


def payload_line(payload: PayloadComplete) -> bytes:
    """A payload as a line that `split` accepts."""
    parts = ", ".join(
        [f'{{"key": "0x{key.hex()}", "value": "0x{value.hex()}"}}' for key, value in payload.parts]
    )
    return f'{{"id": "0x{payload.id.hex()}", "parts": [{parts}]}}\n'.encode("ascii")


def described(payload: PayloadComplete) -> bytes:
    """A payload as a line for people."""
    amount = sum(len(key) + len(value) for key, value in payload.parts)
    return (
        f"0x{payload.id.hex()}  {len(payload.parts):>7,} parts  {size(amount):>10}  "
        f"{payload.source}\n"
    ).encode("utf-8", "replace")


_FIELDS: dict[type, tuple[str, ...]] = {
    Conflict: ("conflict", "what", "key", "prefix", "payload", "source", "position"),
    Malformed: ("malformed", "key", "reason", "source", "position"),
    Dropped: (
        *("dropped", "why", "payload", "prefix", "messages", "bytes", "missing"),
        "positions",
    ),
    SourceLost: ("source_lost", "source", "error"),
    SourceFailed: ("source_failed", "source", "error", "again"),
    SourceBack: ("source_back", "source", "next_entry"),
}


def event_line(event: Notice) -> str:
    """Another event as a line of JSON. Events of ordering, which is off, do not occur."""
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
