"""`datastreamer verify`: check a stream file, or the stream of a server."""

from __future__ import annotations

import shutil
import sys
import textwrap

import typer

from datastreamer.cli.shared.exit_codes import Failure, write_out
from datastreamer.cli.shared.options import (
    NO_TLS,
    REPORT_OUTPUT,
    Format,
    ReportOutput,
    SourceArgument,
    StreamTypeOption,
    TLSOptions,
)
from datastreamer.cli.shared.output import json_line
from datastreamer.cli.shared.progress import ProgressBar
from datastreamer.cli.shared.source import ServerSource, is_server, open_source
from datastreamer.printable import one_line
from datastreamer.storage.maintain.check import verify as check
from datastreamer.storage.maintain.report import NO_REPAIR, Report


def verify(
    source: SourceArgument,
    output: ReportOutput = REPORT_OUTPUT,
    stream_type: StreamTypeOption = None,
    tls: TLSOptions = NO_TLS,
) -> None:
    """Check a stream file: header, every entry, padding, totals, records and bookmark index.

    Only reads, also while the file is written, and reports all damage, each with its repair;
    exit code 1 if there is any. Of a server: checks that it sends every entry in order, and that
    up to 1,000 bookmarks lead to their entries.
    """
    shape = output.chosen()
    served = is_server(source)
    if served:
        report = _check_server(source, stream_type, tls)
    elif stream_type is not None:
        raise typer.BadParameter(f"--stream-type is for servers, and {source} is a file")
    else:
        tls.check_unused(source)
        with ProgressBar(f"checking {source}", 1) as bar:
            report = check(source, progress=bar.reach)
    table = shape is not Format.jsonl
    write_out(report_table(source, report) if table else json_line(report.as_dict()))
    if not report.ok:
        text = f"{count(len(report.problems), 'problem')}, each listed with its repair"
        if not served and not all(problem.repair == NO_REPAIR for problem in report.problems):
            text += "; `datastreamer repair --dry-run` prints what repair would do"
        raise Failure(f"{source}: {text}")


def _check_server(source: str, stream_type: int | None, tls: TLSOptions) -> Report:
    from datastreamer.client.verify import verify_server

    with open_source(source, stream_type, tls=tls) as server:
        assert isinstance(server, ServerSource)
        total = server.header().total_entries
        with ProgressBar(f"checking {source}", total) as bar:
            return verify_server(server.client, advance=bar.advance)


def report_table(name: str, report: Report) -> bytes:
    """A report for people."""
    verdict = "no problems" if report.ok else count(len(report.problems), "problem")
    lines = [f"{name}: {verdict}", ""]
    for title, number in (
        ("entries", report.entries),
        ("bookmarks", report.bookmarks),
        ("pages", report.pages),
    ):
        lines.append(f"{title:10}  {number:,}")
    for problem in report.problems:
        lines += ["", f"{problem.where}:", *wrapped(problem.what), f"  -> {problem.repair}"]
    for note in report.notes:
        lines += ["", "note:", *wrapped(note)]
    return printable(lines)


def wrapped(text: str) -> list[str]:
    """Indented lines, no longer than the terminal is wide."""
    width = max(40, shutil.get_terminal_size((100, 25)).columns)
    return textwrap.wrap(
        text, width, initial_indent="  ", subsequent_indent="  ", break_on_hyphens=False
    )


def printable(lines: list[str]) -> bytes:
    """Lines for standard output, with outside data escaped."""
    text = "".join([f"{one_line(line, None)}\n" for line in lines])
    return text.encode(sys.stdout.encoding or "utf-8", "replace")


def count(number: int, what: str) -> str:
    """A number with its noun."""
    return f"{number:,} {what}" if number == 1 else f"{number:,} {what}s"
