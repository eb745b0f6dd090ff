"""`datastreamer verify`: check a stream file against everything that the format promises."""

from __future__ import annotations

import shutil
import sys
import textwrap

from datastreamer.cli.options import (
    FileArgument,
    Format,
    JsonOption,
    ReportFormatOption,
    chosen_format,
)
from datastreamer.cli.outcome import Failure, write_out
from datastreamer.cli.output import json_line
from datastreamer.cli.progress import Progress
from datastreamer.storage.check import verify as check
from datastreamer.storage.report import NO_REPAIR, Report


def verify(
    file: FileArgument,
    format: ReportFormatOption = None,
    json: JsonOption = False,
) -> None:
    """Check a stream file: header, every entry, padding, totals, records and bookmark index.

    Reads only, also beside a writer, and tells of all damage it finds, each with what helps.
    Exit 1 where there is any.
    """
    shape = chosen_format(format, json)
    with Progress(f"checking {file}", 1) as bar:
        report = check(file, progress=bar.reach)
    write_out(json_line(report.as_dict()) if shape is Format.jsonl else report_table(file, report))
    if not report.ok:
        told = f"{count(len(report.problems), 'problem')}; what helps stands behind each"
        if not all(problem.repair == NO_REPAIR for problem in report.problems):
            told += "; repair --dry-run says what repair would do"
        raise Failure(f"{file}: {told}")


def report_table(name: str, report: Report) -> bytes:
    """A report for people."""
    verdict = "whole" if report.ok else count(len(report.problems), "problem")
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
    """Lines for standard output, whatever names they hold."""
    text = "".join(f"{line}\n" for line in lines)
    return text.encode(sys.stdout.encoding or "utf-8", "replace")


def count(number: int, what: str) -> str:
    """A number of things."""
    return f"{number:,} {what}" if number == 1 else f"{number:,} {what}s"
