"""A batch or block with its transactions as JSON values, from its entries.

Owns which entries belong to it, beginning with its bookmark.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from datastreamer._codec import Entry
from datastreamer.errors import DecodeFailed
from datastreamer.zkevm import events, fixed
from datastreamer.zkevm.bookmark_keys import Kind
from datastreamer.zkevm.decoding import Event, as_json, decode, event_name
from datastreamer.zkevm.events import BookmarkType

FoundEvent = tuple[Entry, Event]


def marked_entries(kind: Kind, entries: Iterable[Entry], version: int) -> Iterator[FoundEvent]:
    """The entries of a batch or block with their events, from those that begin with its bookmark.

    Raises `DecodeFailed`.
    """
    begun = False
    for entry in entries:
        event = decode(entry, version=version)
        if begun and _is_over(kind, event):
            return
        yield entry, event
        begun = True
        if isinstance(event, _LAST[kind]):
            return


_LAST = {"batch": (events.BatchEnd,), "block": (events.L2BlockEnd, fixed.EndL2Block)}


def _is_over(kind: Kind, event: Event) -> bool:
    """Whether an event follows the batch or block."""
    if kind == "batch":
        return isinstance(event, events.BookMark) and event.type == BookmarkType.BATCH
    over = (events.BookMark, events.BatchStart, events.BatchEnd, events.UpdateGER)
    return isinstance(event, (*over, fixed.FixedUpdateGER))


def batch_json(found: list[FoundEvent], opening: bool) -> dict[str, Any]:
    head: dict[str, Any] = {"bookmark": found[0][0].number, "start": None}
    ger_updates = []
    end = None
    inside: list[FoundEvent] = []
    for entry, event in found[1:]:
        if isinstance(event, events.BatchStart):
            head["start"] = _described(entry, event)
        elif isinstance(event, events.BatchEnd):
            end = _described(entry, event)
        elif isinstance(event, events.UpdateGER | fixed.FixedUpdateGER):
            ger_updates.append(_described(entry, event))
        else:
            inside.append((entry, event))
    return {**head, "blocks": blocks_json(inside, opening), "ger_updates": ger_updates, "end": end}


def blocks_json(found: list[FoundEvent], opening: bool) -> list[dict[str, Any]]:
    """The blocks in a run of bookmarks, blocks, transactions and ends."""
    blocks: list[dict[str, Any]] = []
    mark = None
    for entry, event in found:
        if isinstance(event, events.BookMark):
            mark = entry.number
        elif isinstance(event, events.L2Block | fixed.StartL2Block):
            block = {"bookmark": mark, "block": _described(entry, event)}
            blocks.append({**block, "transactions": [], "end": None})
            mark = None
        elif not blocks:
            raise DecodeFailed(entry.number, f"{event_name(event)} outside of a block")
        elif isinstance(event, events.Transaction | fixed.L2Tx):
            opened = _opened(event) if opening else {}
            blocks[-1]["transactions"].append(_described(entry, event) | opened)
        else:
            blocks[-1]["end"] = _described(entry, event)
    return blocks


def _described(entry: Entry, event: Event) -> dict[str, Any]:
    return {"entry": entry.number, "kind": event_name(event), "fields": as_json(event)}


def _opened(event: events.Transaction | fixed.L2Tx) -> dict[str, Any]:
    try:
        return {"opened": event.open().as_json()}
    except DecodeFailed as error:
        return {"opened": None, "error": error.reason}
