"""`datastreamer zkevm batch` and `zkevm block`: print one, found by its bookmark.

Owns which entries belong to it, and the JSON; `tree` draws it for people.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any

import typer

from datastreamer._codec import Entry
from datastreamer.cli.shared.exit_codes import Failure, write_out
from datastreamer.cli.shared.options import (
    Format,
    ReportOutput,
    SourceOptions,
    StreamArgument,
    StreamVersionOption,
    number_parser,
)
from datastreamer.cli.shared.output import json_line
from datastreamer.cli.shared.source import named_not_found, open_source
from datastreamer.errors import DecodeFailed
from datastreamer.zkevm import events, fixed
from datastreamer.zkevm.bookmark_keys import BookmarkName, Kind, key_of
from datastreamer.zkevm.decoding import Event, as_json, decode, event_name
from datastreamer.zkevm.events import BookmarkType

NumberArgument = Annotated[
    int,
    typer.Argument(metavar="N", parser=number_parser(), help="Number of the batch or block."),
]
NoOpenOption = Annotated[
    bool,
    typer.Option("--no-open", help="Do not decode transactions to fields, hash and sender."),
]


def batch(
    source: StreamArgument,
    number: NumberArgument,
    *,
    no_open: NoOpenOption = False,
    stream_version: StreamVersionOption = None,
    output: ReportOutput,
    options: SourceOptions,
) -> None:
    """Show a batch with its blocks and their transactions.

    Examples:
      datastreamer zkevm batch stream.bin 3
      datastreamer zkevm batch 127.0.0.1:6900 3 --json
    """
    shape = output.chosen()
    mark = BookmarkName("batch", number)
    entries = list(_marked_entries(source, mark, stream_version, options))
    _write(shape, "batch", _batch(entries, not no_open))


def block(
    source: StreamArgument,
    number: NumberArgument,
    *,
    no_open: NoOpenOption = False,
    stream_version: StreamVersionOption = None,
    output: ReportOutput,
    options: SourceOptions,
) -> None:
    """Show a block with its transactions.

    Examples:
      datastreamer zkevm block stream.bin 7
      datastreamer zkevm block 127.0.0.1:6900 7 --json
    """
    shape = output.chosen()
    mark = BookmarkName("block", number)
    entries = list(_marked_entries(source, mark, stream_version, options))
    found = _blocks(entries, not no_open)
    if not found:
        first = entries[0][0].number
        raise Failure(f"{source}: no block follows the bookmark in entry {first}")
    _write(shape, "block", found[0])


def _write(shape: Format, kind: Kind, found: dict[str, Any]) -> None:
    if shape == "jsonl":
        write_out(json_line(found))
    else:
        from datastreamer.cli.verbs.zkevm.tree import batch_tree, block_tree, printed

        write_out(printed(batch_tree(found) if kind == "batch" else block_tree(found)))


_Found = tuple[Entry, Event]


def _marked_entries(
    source: str, mark: BookmarkName, version: int | None, options: SourceOptions
) -> Iterator[_Found]:
    """The entries of a batch or block with their events, beginning with its bookmark."""
    with open_source(source, options) as stream, named_not_found(source, str(mark)):
        header = stream.header()
        version = version or header.version
        begun = False
        for run in stream.batches(key_of(version, mark), header.total_entries):
            for entry in run:
                event = decode(entry, version=version)
                if begun and _is_over(mark.kind, event):
                    return
                yield entry, event
                begun = True
                if isinstance(event, _LAST[mark.kind]):
                    return


_LAST = {"batch": (events.BatchEnd,), "block": (events.L2BlockEnd, fixed.EndL2Block)}


def _is_over(kind: Kind, event: Event) -> bool:
    """Whether an event follows the batch or block."""
    if kind == "batch":
        return isinstance(event, events.BookMark) and event.type == BookmarkType.BATCH
    over = (events.BookMark, events.BatchStart, events.BatchEnd, events.UpdateGER)
    return isinstance(event, (*over, fixed.FixedUpdateGER))


def _batch(found: list[_Found], opening: bool) -> dict[str, Any]:
    head: dict[str, Any] = {"bookmark": found[0][0].number, "start": None}
    ger_updates = []
    end = None
    inside: list[_Found] = []
    for entry, event in found[1:]:
        if isinstance(event, events.BatchStart):
            head["start"] = _described(entry, event)
        elif isinstance(event, events.BatchEnd):
            end = _described(entry, event)
        elif isinstance(event, events.UpdateGER | fixed.FixedUpdateGER):
            ger_updates.append(_described(entry, event))
        else:
            inside.append((entry, event))
    return {**head, "blocks": _blocks(inside, opening), "ger_updates": ger_updates, "end": end}


def _blocks(found: list[_Found], opening: bool) -> list[dict[str, Any]]:
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
