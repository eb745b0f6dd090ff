"""`datastreamer sums`: make the checksums beside a stream file."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from datastreamer.cli.consent import Consent
from datastreamer.cli.shared.exit_codes import DamageFound, write_out
from datastreamer.cli.shared.options import FileArgument, ReportOutput
from datastreamer.cli.shared.output import count, json_line, text_lines
from datastreamer.cli.shared.progress import ProgressBar
from datastreamer.storage.maintain.check import verify as check
from datastreamer.storage.write.opening import make_sums

AcceptOption = Annotated[
    bool,
    typer.Option(
        "--accept",
        help="Discard the checksums and make them again from the present bytes of the file, even "
        "if these are damaged or another program changed them. If pages differ from their "
        "checksums, asks first on a terminal; elsewhere, needs --yes.",
    ),
]


def sums(
    file: FileArgument, *, accept: AcceptOption = False, consent: Consent, output: ReportOutput
) -> None:
    """Make the checksums that are missing beside a file.

    Checksums are in FILE.sums. A writer makes them by itself, missing ones in the background; use
    this command for a file that another program wrote. No other process may write the stream
    meanwhile. `verify` compares the file with its checksums.

    Examples:
      datastreamer sums stream.bin
      datastreamer sums stream.bin && datastreamer verify stream.bin
    """
    shape = output.chosen()
    if consent.dry_run and not accept:
        raise typer.BadParameter("--dry-run requires --accept")
    if accept and (consent.dry_run or not consent.yes):
        with ProgressBar(f"checking {file}", 1) as bar:
            problems = check(file, progress=bar.reach).problems
        loss = f"{file}: this takes {count(len(problems), 'problem')} for right, permanently"
        if problems:
            loss += f"; the first is {problems[0].what}"
        if consent.dry_run:
            facts = {"changed": False, "problems": [asdict(each) for each in problems]}
            text = text_lines([f"{loss}; --dry-run: nothing was changed"])
            write_out(json_line(facts) if shape == "jsonl" else text)
            return
        if problems:
            consent.require(loss, "Discard what shows the damage?")
    with ProgressBar(f"reading {file}", 1) as bar:
        made = make_sums(file, accept=accept, progress=bar.reach)
    if shape == "jsonl":
        write_out(json_line(made._asdict()))
    else:
        write_out(
            text_lines([f"{file}: {count(made.pages, 'whole page')}, {made.made:,} new checksums"])
        )
    if made.refuted:
        raise DamageFound(
            f"{file}: {made.refuted}: `datastreamer repair --from HOST:PORT` asks a server of the "
            "same stream; --accept takes the pages as they are"
        )
    if made.damaged:
        raise DamageFound(
            f"{file}: {count(made.damaged, 'page')} cannot be read as entries, so there is no "
            "checksum of them; `datastreamer verify` lists them"
        )
