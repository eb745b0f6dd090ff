"""`datastreamer zkevm check`: check the order of batches and blocks."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import Final

from datastreamer.cli.shared.exit_codes import DamageFound, write_out
from datastreamer.cli.shared.options import (
    Format,
    ReportOutput,
    SourceOptions,
    StreamArgument,
    StreamVersionOption,
)
from datastreamer.cli.shared.output import count, json_line, text_lines, wrapped
from datastreamer.cli.shared.progress import ProgressBar
from datastreamer.cli.shared.source import open_source
from datastreamer.zkevm.check.sequence import Breach, SequenceCheck, SequenceReport

# Maximum number of breaches held, of 225 bytes each.
_HELD: Final = 10_000


def check(
    source: StreamArgument,
    *,
    stream_version: StreamVersionOption = None,
    output: ReportOutput,
    options: SourceOptions,
) -> None:
    """Check the sequence of entries, blocks, batches and parents.

    Also checks bookmarks and timestamps. Prints every violation with its entry number; exit code 3
    if there is any.

    Examples:
      datastreamer zkevm check stream.bin
      datastreamer zkevm check 127.0.0.1:6900 --json
    """
    breaches = _BreachOutput(output.chosen())
    with open_source(source, options) as stream:
        header = stream.header()
        checked = SequenceCheck(stream_version or header.version, breaches.add)
        if header.total_entries:
            with ProgressBar(f"checking {source}", header.total_entries) as progress:
                for run in stream.batches(0, header.total_entries):
                    checked.feed(run)
                    progress.advance(len(run))
    report = checked.report()
    breaches.end(source, report)
    if not report.ok:
        number = count(sum(report.broken.values()), "violation")
        raise DamageFound(f"{source}: {number} of the order, the first at entry {report.first}")


class _BreachOutput:
    """Writes breaches, sorted by entry within a window of `_HELD`, in bounded memory.

    JSON is one object, whose list of breaches is written piece by piece.
    """

    def __init__(self, shape: Format) -> None:
        self._json = shape == "jsonl"
        self._held: list[Breach] = []
        self._written = 0

    def add(self, breach: Breach) -> None:
        if len(self._held) < _HELD:
            heapq.heappush(self._held, breach)
        else:
            self._write([heapq.heappushpop(self._held, breach)])

    def end(self, name: str, report: SequenceReport) -> None:
        """Write the remaining breaches and the report."""
        self._write(sorted(self._held))
        self._held.clear()
        if self._json:
            rest = json_line({key: it for key, it in report.as_dict().items() if key != "breaches"})
            write_out((b"], " if self._written else b'{"breaches": [], ') + rest[1:])
        else:
            write_out((b"\n" if self._written else b"") + _table(name, report))

    def _write(self, breaches: Sequence[Breach]) -> None:
        for breach in breaches:
            if self._json:
                before = b", " if self._written else b'{"breaches": ['
                text = before + json_line(breach._asdict()).rstrip()
            else:
                lines = [f"entry {breach.entry}, {breach.rule}:", *wrapped(breach.what)]
                text = text_lines(["", *lines] if self._written else lines)
            write_out(text)
            self._written += 1


def _table(name: str, report: SequenceReport) -> bytes:
    verdict = "in order" if report.ok else "not in order"
    lines = [f"{name}: {verdict}", ""]
    rows = [("entries", f"{report.entries:,}")]
    for title, span in (("batches", report.batches), ("blocks", report.blocks)):
        rows.append((title, "none" if span is None else f"{span[0]} to {span[1]}"))
    rows.append(("parents", f"{report.parents:,} checked"))
    rows += [(kind, f"{number:,}") for kind, number in report.events.items()]
    rows += [(f"broken: {rule}", f"{number:,}") for rule, number in report.broken.items()]
    width = max(12, *(len(title) for title, _ in rows))
    lines += [f"{title:{width}}  {value}" for title, value in rows]
    for note in report.notes:
        lines += ["", "note:", *wrapped(note)]
    return text_lines(lines)
