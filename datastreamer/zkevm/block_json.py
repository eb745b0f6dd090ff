"""A batch or block with its transactions as JSON values, from its entries.

Owns which entries belong to it, beginning with its bookmark.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any, Final, TypeGuard

from datastreamer._codec import Entry
from datastreamer.errors import DecodeFailed
from datastreamer.zkevm import events, fixed
from datastreamer.zkevm.bookmark_keys import Kind
from datastreamer.zkevm.decoding import Event, as_json, decode, event_name, kind_of
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


def is_block_start(type: int, version: int) -> bool:
    """Whether entries of this type begin a block in a stream of this version."""
    return kind_of(type, version) in [each.__name__ for each in _BLOCKS]


def is_transaction(event: Event) -> TypeGuard[events.Transaction | fixed.L2Tx]:
    return isinstance(event, _TRANSACTIONS)


def summary_json(found: list[FoundEvent], opening: bool) -> dict[str, Any] | None:
    """A line about the block that these events are: with `opening` also the gas limits of its
    transactions, and the highest fees for that gas in wei. None if no block is among them."""
    line: dict[str, Any] = {}
    gas = fees = count = 0
    for entry, event in found:
        if isinstance(event, _BLOCKS):
            line = {
                "number": event.number,
                "entry": entry.number,
                "batch": event.batch_number,
                "timestamp": event.timestamp,
                "hash": None,
            }
        if isinstance(event, events.L2Block | fixed.EndL2Block) and event.hash:
            line["hash"] = f"0x{event.hash.hex()}"
        if is_transaction(event):
            count += 1
            if opening:
                with contextlib.suppress(DecodeFailed):
                    opened = event.open(sender=False)
                    price = opened.gas_price or opened.max_fee_per_gas or 0
                    gas += opened.gas
                    fees += opened.gas * price * (event.effective_gas_price_percentage + 1) // 256
    if not line:
        return None
    values = {"gas": gas, "fees": str(fees)} if opening else {"gas": None, "fees": None}
    return {**line, "transactions": count, **values}


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
