"""`datastreamer zkevm check`: whether a stream's batches and blocks are in order."""

from __future__ import annotations

from datastreamer.cli.options import (
    NO_TLS,
    Format,
    JsonOption,
    ReportFormatOption,
    SourceArgument,
    StreamTypeOption,
    StreamVersionOption,
    TLSOptions,
    chosen_format,
)
from datastreamer.cli.outcome import Failure, write_out
from datastreamer.cli.output import json_line
from datastreamer.cli.progress import Progress
from datastreamer.cli.source import open_source
from datastreamer.cli.verify import count, printable, wrapped
from datastreamer.zkevm.sequence import Report, SequenceCheck


def check(
    source: SourceArgument,
    stream_version: StreamVersionOption = None,
    format: ReportFormatOption = None,
    json: JsonOption = False,
    stream_type: StreamTypeOption = None,
    tls: TLSOptions = NO_TLS,
) -> None:
    """Check the sequence of entries, bookmarks, batches, blocks, timestamps and parents.

    Tells of every breach with its entry's number. Exit 1 where there is any.
    """
    shape = chosen_format(format, json)
    with open_source(source, stream_type, tls=tls) as stream:
        header = stream.header()
        checked = SequenceCheck(stream_version or header.version)
        if header.total_entries:
            with Progress(f"checking {source}", header.total_entries) as progress:
                for run in stream.batches(0, header.total_entries):
                    checked.feed(run)
                    progress.advance(len(run))
    report = checked.report()
    write_out(json_line(report.as_dict()) if shape is Format.jsonl else _table(source, report))
    if not report.ok:
        first = report.breaches[0]
        told = count(len(report.breaches), "breach").replace("breachs", "breaches")
        raise Failure(f"{source}: {told} of the order, the first in entry {first.entry}")


def _table(name: str, report: Report) -> bytes:
    verdict = "in order" if report.ok else "not in order"
    lines = [f"{name}: {verdict}", ""]
    rows = [("entries", f"{report.entries:,}")]
    for title, span in (("batches", report.batches), ("blocks", report.blocks)):
        rows.append((title, "none" if span is None else f"{span[0]} to {span[1]}"))
    rows.append(("parents", f"{report.parents:,} checked"))
    rows += [(kind, f"{number:,}") for kind, number in report.events.items()]
    lines += [f"{title:12}  {value}" for title, value in rows]
    for breach in report.breaches:
        lines += ["", f"entry {breach.entry}, {breach.rule}:", *wrapped(breach.what)]
    for note in report.notes:
        lines += ["", "note:", *wrapped(note)]
    return printable(lines)
