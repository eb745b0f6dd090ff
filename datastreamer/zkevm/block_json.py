"""A batch or block with its transactions as JSON values, from its entries.

Owns which entries belong to it, beginning with its bookmark.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Final

from datastreamer._codec import Entry
from datastreamer.errors import DecodeFailed
from datastreamer.zkevm import events, fixed
from datastreamer.zkevm.bookmark_keys import Kind
from datastreamer.zkevm.decoding import Event, as_json, decode, event_name
from datastreamer.zkevm.events import BookmarkType

FoundEvent = tuple[Entry, Event]
DescribedEvent = tuple[Event, dict[str, Any]]

_GER_UPDATES: Final = (events.UpdateGER, fixed.FixedUpdateGER)
_BLOCKS: Final = (events.L2Block, fixed.StartL2Block)
_TRANSACTIONS: Final = (events.Transaction, fixed.L2Tx)


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


def described(found: FoundEvent, opening: bool) -> DescribedEvent:
    """An event with its values. With `opening` a transaction also has its fields, hash and sender,
    which takes most of the time of an answer. Raises `ExtraMissing` if that needs a package."""
    entry, event = found
    value = {"entry": entry.number, "kind": event_name(event), "fields": as_json(event)}
    if opening and isinstance(event, _TRANSACTIONS):
        value |= _opened(event)
    return event, value


def batch_json(found: list[DescribedEvent]) -> dict[str, Any]:
    """The batch that these events are. Raises `DecodeFailed`."""
    head: dict[str, Any] = {"bookmark": found[0][1]["entry"], "start": None}
    ger_updates = []
    end = None
    inside: list[DescribedEvent] = []
    for event, value in found[1:]:
        if isinstance(event, events.BatchStart):
            head["start"] = value
        elif isinstance(event, events.BatchEnd):
            end = value
        elif isinstance(event, _GER_UPDATES):
            ger_updates.append(value)
        else:
            inside.append((event, value))
    return {**head, "blocks": blocks_json(inside), "ger_updates": ger_updates, "end": end}


def blocks_json(found: list[DescribedEvent]) -> list[dict[str, Any]]:
    """The blocks in a run of bookmarks, blocks, transactions and ends. Raises `DecodeFailed`."""
    blocks: list[dict[str, Any]] = []
    mark = None
    for event, value in found:
        if isinstance(event, events.BookMark):
            mark = value["entry"]
        elif isinstance(event, _BLOCKS):
            blocks.append({"bookmark": mark, "block": value, "transactions": [], "end": None})
            mark = None
        elif not blocks:
            raise DecodeFailed(value["entry"], f"{event_name(event)} outside of a block")
        elif isinstance(event, _TRANSACTIONS):
            blocks[-1]["transactions"].append(value)
        else:
            blocks[-1]["end"] = value
    return blocks


def _opened(event: events.Transaction | fixed.L2Tx) -> dict[str, Any]:
    try:
        return {"opened": event.open().as_json()}
    except DecodeFailed as error:
        return {"opened": None, "error": error.reason}
