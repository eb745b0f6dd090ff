"""The output of `reassemble`: payloads and events as lines, statistics as a table."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from datastreamer.cli.shared import logs
from datastreamer.cli.shared.console import new_console, text
from datastreamer.cli.shared.metrics_client import size
from datastreamer.cli.shared.output import json_line
from datastreamer.consumer.consumption import (
    Notice,
    SourceBack,
    SourceFailed,
    SourceLost,
    SourceRolledBack,
    SourceState,
)
from datastreamer.reassembly.checkpoint import Stats
from datastreamer.reassembly.events import Conflict, Dropped, Malformed, PayloadComplete

if TYPE_CHECKING:
    import rich.console
    import rich.live


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


def event_line(event: Notice) -> str:
    """Another event as a line of JSON."""
    match event:
        case Conflict():
            line = _with_position("conflict", event, "what", "key", "prefix", "payload")
        case Malformed():
            line = _with_position("malformed", event, "key", "reason")
        case Dropped():
            line = {
                "event": "dropped",
                "why": event.why,
                "payload": _hex(event.payload),
                "prefix": _hex(event.prefix),
                "messages": event.messages,
                "bytes": event.bytes,
                "missing": event.missing,
                "positions": dict(event.positions),
            }
        case SourceLost():
            line = {"event": "source_lost", "source": event.source, "error": str(event.error)}
        case SourceFailed():
            line = {
                "event": "source_failed",
                "source": event.source,
                "error": str(event.error),
                "again": event.again,
            }
        case SourceBack():
            line = {
                "event": "source_back",
                "source": event.source,
                "next_entry": event.next_entry,
            }
        case SourceRolledBack():
            line = {
                "event": "source_rolled_back",
                "source": event.source,
                "to_entry": event.rollback.to_entry,
                "from_entry": event.rollback.from_entry,
            }
        case _:
            raise AssertionError(f"{event} is an event of ordering, which is off")
    return json_line(line).decode().rstrip("\n")


def _with_position(name: str, event: Conflict | Malformed, *fields: str) -> dict[str, Any]:
    line: dict[str, Any] = {"event": name}
    for field in fields:
        value = getattr(event, field)
        line[field] = _hex(value) if isinstance(value, bytes) else value
    return {**line, "source": event.source, "position": event.position}


def _hex(value: bytes | None) -> str | None:
    return None if value is None else f"0x{value.hex()}"


class Board:
    """Statistics: a live table, or lines of JSON on stderr."""

    def __init__(self, *, shown: bool, live: bool) -> None:
        self.shown = shown
        self.live = live
        self._live: rich.live.Live | None = None

    def __enter__(self) -> Board:
        if self.live:
            from rich.live import Live

            console = new_console(sys.stdout)
            self._live = Live(console=console, auto_refresh=False, vertical_overflow="crop")
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()

    def show(self, stats: Stats, states: Mapping[str, SourceState], age: float | None) -> None:
        """Show the statistics; `age` is that of the oldest incomplete payload."""
        if self._live is not None:
            self._live.update(table(stats, states, age), refresh=True)
            return
        line = {
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
        logs.say_verbatim(json_line(line).decode().rstrip("\n"))


_COUNTS = ("received", "duplicates", "conflicts", "malformed", "outside")


def _counts(stats: Stats, name: str) -> dict[str, int]:
    counts = stats.sources.get(name)
    return {field: 0 if counts is None else getattr(counts, field) for field in _COUNTS}


def table(
    stats: Stats, states: Mapping[str, SourceState], age: float | None
) -> rich.console.RenderableType:
    """The totals, and a row for each source."""
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
