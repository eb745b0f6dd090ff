"""`datastreamer verify`: check a stream file, or the stream of a server."""

from __future__ import annotations

import typer

from datastreamer.archive import PREFIX, is_archive
from datastreamer.cli.shared.addresses import both_readings, server_address
from datastreamer.cli.shared.exit_codes import DamageFound, write_out
from datastreamer.cli.shared.options import ReportOutput, SourceArgument, SourceOptions
from datastreamer.cli.shared.output import count, json_line, text_lines, wrapped
from datastreamer.cli.shared.progress import ProgressBar
from datastreamer.cli.shared.source import ServerSource
from datastreamer.storage.maintain.check import verify as check
from datastreamer.storage.maintain.report import NO_REPAIR, Report


def verify(source: SourceArgument, *, output: ReportOutput, options: SourceOptions) -> None:
    """Check a stream file, the stream of a server, or an archive.

    For a file, checks header, every entry, padding, totals, records and bookmark index; other
    programs may write it meanwhile. Changes nothing. Reports all damage, and what repairs it; exit
    code 3 if there is any. For a server, checks that it sends every entry in order, and that up to
    1,000 bookmarks lead to their entries. For an archive, does what `archive verify` does.

    Examples:
      datastreamer verify stream.bin
      datastreamer verify stream.bin --json | jq .problems
    """
    shape = output.chosen()
    address = server_address(source)
    if address is not None:
        with both_readings(source):
            server = ServerSource(address, options=options)
        report = _check_server(source, server)
    elif options.stream_type is not None:
        raise typer.BadParameter(f"--stream-type is for servers, and {source} is a file")
    else:
        options.check_unused(source)
        if is_archive(source):
            from datastreamer.cli.verbs.archive.verify import verify as verify_archive

            verify_archive(source.removeprefix(PREFIX), output=output)
            return
        with ProgressBar(f"checking {source}", 1) as bar:
            report = check(source, progress=bar.reach)
    write_out(json_line(report.as_dict()) if shape == "jsonl" else _table(source, report))
    if not report.ok:
        repairs = [problem.repair for problem in report.problems]
        text = f"{count(len(repairs), 'problem')}, each listed with its repair"
        if address is None and not all(each == NO_REPAIR for each in repairs):
            # What a server restores has to be restored before anything is removed.
            first = next((each for each in repairs if "--from" in each), repairs[0])
            text += f"; next: {first}"
            if "datastreamer repair" in first:
                text += "; add --dry-run to see what it would do"
        raise DamageFound(f"{source}: {text}")


def _check_server(source: str, server: ServerSource) -> Report:
    from datastreamer.client.verify import verify_server

    with server, ProgressBar(f"checking {source}", server.header().total_entries) as bar:
        return verify_server(server.client, advance=bar.advance)


def _table(name: str, report: Report) -> bytes:
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
    return text_lines(lines)
