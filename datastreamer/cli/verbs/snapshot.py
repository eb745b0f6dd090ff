"""`datastreamer snapshot`: a consistent copy of a stream that may be written meanwhile."""

from __future__ import annotations

from typing import Annotated

import typer

from datastreamer.cli.shared import logs
from datastreamer.cli.shared.options import FileArgument
from datastreamer.cli.shared.progress import ProgressBar
from datastreamer.storage.maintain.snapshot import snapshot as take

OutArgument = Annotated[
    str, typer.Argument(metavar="OUT", help="The copy's name; nothing may stand there.")
]


def snapshot(
    file: FileArgument,
    out: OutArgument,
) -> None:
    """Copy a stream, consistently, while others may write and serve it.

    The copy holds what is committed at the start and opens by itself; its first writer makes
    its bookmark index. FILE need not be writable.
    """
    with ProgressBar(f"copying {file}", 1) as progress:
        taken = take(file, out, advance=progress.reach)
    logs.say(
        f"{out} holds {taken.header.total_entries:,} entries, {taken.header.total_length:,} bytes, "
        f"in a file of {taken.size:,} bytes (by {taken.means})"
    )
