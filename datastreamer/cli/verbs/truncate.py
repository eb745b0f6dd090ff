"""`datastreamer truncate`: remove the last entries of a stream."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from datastreamer.cli.consent import Consent
from datastreamer.cli.shared import logs
from datastreamer.cli.shared.exit_codes import Failure
from datastreamer.cli.shared.options import FileArgument, number_parser
from datastreamer.cli.shared.output import JsonResult, count
from datastreamer.cli.shared.progress import ProgressBar
from datastreamer.cli.shared.signals import StopRequest
from datastreamer.errors import DamagedEntry
from datastreamer.format import TYPE_BOOKMARK
from datastreamer.printable import counted
from datastreamer.selection.times import moment_text
from datastreamer.storage.stream import DataStream

CountArgument = Annotated[
    int,
    typer.Argument(
        metavar="N",
        parser=number_parser(),
        help="Number of entries to keep: those before entry N.",
    ),
]


def truncate(
    file: FileArgument, number: CountArgument, *, consent: Consent, result: JsonResult
) -> None:
    """Truncate a stream to its first N entries, permanently.

    On a terminal, prints what it removes, and asks; elsewhere, needs --yes. Bookmarks among the
    removed entries are removed; an older bookmark with the same key is found again.

    Examples:
      datastreamer truncate stream.bin 1000 --dry-run
      datastreamer truncate stream.bin 1000 --yes
    """
    facts = _removed(file, number)
    before = facts["total_entries"] + facts["removed_entries"]
    if number == before:
        result.report(f"{file} already holds {count(before, 'entry')}; nothing was changed", facts)
        return
    loss = f"{file}: this permanently removes {_described(facts)}"
    if consent.dry_run:
        result.report(f"{loss}; --dry-run: nothing was changed", facts)
        return
    consent.require(loss)
    with logs.hold_index_errors(), DataStream.open(file) as stream:
        if stream.total_entries != before:
            raise Failure(
                f"{file}: it held {count(before, 'entry')} and holds "
                f"{stream.total_entries:,} now; "
                "nothing was changed: run it again"
            )
        # A signal does not interrupt the truncation.
        with StopRequest():
            stream.truncate(number)
        length = stream.header.total_length
    result.report(
        f"{file} was truncated from {before:,} to {count(number, 'entry')}, {length:,} bytes: "
        f"removed {_described(facts)}",
        facts | {"changed": True, "total_length": length},
    )


def _removed(file: str, number: int) -> dict[str, Any]:
    """What a truncation to `number` entries removes: null what is not known. Writes nothing."""
    with DataStream.open(file, read_only=True, index="memory", verify="never") as stream:
        total, length = stream.header.total_entries, stream.header.total_length
        if number > total:
            raise Failure(f"{file}: cannot truncate to {counted(number)}: the stream holds {total}")
        facts: dict[str, Any] = {
            "changed": False,
            "total_entries": number,
            "total_length": length,
            "removed_entries": total - number,
            "removed_bytes": 0,
            "removed_bookmarks": 0,
            "first_time": None,
            "last_time": None,
        }
        if number == total:
            return facts
        try:
            with ProgressBar(f"reading {file}", total - number) as bar:
                for batch in stream.batches(number, total):
                    facts["removed_bytes"] += batch.nbytes
                    facts["removed_bookmarks"] += batch.count(TYPE_BOOKMARK)
                    bar.advance(len(batch))
            for name, entry in (("first_time", number), ("last_time", total - 1)):
                ms = stream.time_of(entry)
                facts[name] = None if ms is None else moment_text(ms)
        except DamagedEntry:
            # What is damaged can be removed nevertheless.
            facts |= {"removed_bytes": None, "removed_bookmarks": None}
    return facts


def _described(facts: dict[str, Any]) -> str:
    first, entries = facts["total_entries"], facts["removed_entries"]
    text = f"{count(entries, 'entry')} from entry {first:,} on"
    if facts["removed_bytes"] is None:
        return f"{text}, some of them damaged"
    text += f", {count(facts['removed_bytes'], 'byte')}, among them "
    text += count(facts["removed_bookmarks"], "bookmark")
    first_time, last_time = facts["first_time"], facts["last_time"]
    if first_time is None or last_time is None:
        return f"{text}, committed at times that are not known"
    return f"{text}, committed from {first_time} to {last_time}"
