"""`datastreamer repair`: repair a damaged stream file."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from datastreamer.cli.shared.exit_codes import write_out
from datastreamer.cli.shared.options import FileArgument, ReportOutput
from datastreamer.cli.shared.output import count, json_line, text_lines, wrapped
from datastreamer.cli.shared.progress import ProgressBar
from datastreamer.storage.maintain.repair import Plan, Repaired, plan
from datastreamer.storage.maintain.repair import repair as mend
from datastreamer.storage.maintain.report import counted

DryRunOption = Annotated[
    bool, typer.Option("--dry-run", help="Print what would be done, and change nothing.")
]


def repair(file: FileArgument, *, dry_run: DryRunOption = False, output: ReportOutput) -> None:
    """Repair a file: truncate it to the last complete operation or entry, and fix the totals.

    Entries after damage are removed, since numbers have no gaps. The changed part is copied to
    FILE.<time>.repair first. A healthy file is not changed.
    """
    shape = output.chosen()
    with ProgressBar(f"checking {file}", 1) as bar:
        if dry_run:
            made, done = plan(file, progress=bar.reach), None
        else:
            done = mend(file, progress=bar.reach)
            made = done.plan
    facts = _facts(made, done)
    write_out(json_line(facts) if shape == "jsonl" else _table(file, made, done))


def _facts(made: Plan, done: Repaired | None) -> dict[str, Any]:
    total = made.claimed if made.header is None else made.header.total_entries
    return {
        "changed": done is not None and not made.healthy,
        "healthy": made.healthy,
        "entries": total,
        "entries_cut": made.entries_cut,
        "steps": made.steps,
        "problems": made.report.as_dict()["problems"],
        "kept": None if done is None else done.kept,
    }


def _table(name: str, made: Plan, done: Repaired | None) -> bytes:
    if made.healthy:
        return text_lines([f"{name}: no problems; nothing was changed"])
    lines = [f"{name}: {count(len(made.report.problems), 'problem')}"]
    for problem in made.report.problems:
        lines += ["", f"{problem.where}:", *wrapped(problem.what)]
    lines += ["", "repair would do this (--dry-run: nothing was changed):"]
    if done is not None:
        lines[-1] = "repair did this:"
    for step in made.steps:
        first, *more = wrapped(step)
        lines += [f"- {first.strip()}", *more]
    if made.entries_cut:
        share = counted(made.entries_cut)
        would = "were" if done is not None else "would be"
        lines += ["", f"ATTENTION: {share} at the end of the stream {would} removed."]
    if done is not None and done.kept is not None:
        lines += ["", f"the changed part was copied to {done.kept}"]
    if done is not None:
        lines += [f"checked again: no problems, {done.report.entries:,} entries"]
    return text_lines(lines)
