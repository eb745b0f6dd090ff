"""`datastreamer snapshot`: copy a stream that may be in use."""

from __future__ import annotations

from typing import Annotated

import typer

from datastreamer.cli.shared.addresses import server_address
from datastreamer.cli.shared.exit_codes import Failure
from datastreamer.cli.shared.options import FileArgument
from datastreamer.cli.shared.output import JsonResult, count
from datastreamer.cli.shared.progress import ProgressBar
from datastreamer.storage.maintain.snapshot import snapshot as take

OutArgument = Annotated[
    str, typer.Argument(metavar="OUT", help="Path of the copy; it must not exist.")
]

NoVerifyOption = Annotated[
    bool,
    typer.Option(
        "--no-verify",
        help="Do not read the copy and compare its pages with the stream's checksums; copy a "
        "damaged stream as it is.",
    ),
]

WholeOption = Annotated[
    bool,
    typer.Option(
        "--whole",
        help="Also copy the entries that are in the stream's archive alone; otherwise the copy has "
        "them there, too.",
    ),
]


def snapshot(
    file: FileArgument,
    out: OutArgument,
    *,
    no_verify: NoVerifyOption = False,
    whole: WholeOption = False,
    result: JsonResult,
) -> None:
    """Copy a stream consistently, also while it is written.

    Other programs may write and serve FILE meanwhile; FILE may be read-only. The copy has the
    entries that are committed at the start, and OUT.sums their checksums; the first writer of the
    copy builds its bookmark index. If a page does not match its checksum, fails and leaves no copy.

    Examples:
      datastreamer snapshot stream.bin copy.bin
      datastreamer snapshot stream.bin copy.bin && datastreamer verify copy.bin
    """
    if ":" in file and server_address(file) is not None:
        raise Failure(
            f"{file}: not a file; to copy a server's stream, run "
            f"`datastreamer relay --server {file} --file {out}`"
        )
    with ProgressBar(f"copying {file}", 1, left="no copy is left") as progress:
        taken = take(file, out, verify=not no_verify, whole=whole, advance=progress.reach)
    compared = "" if no_verify else f"; {count(taken.verified, 'page')} compared with checksums"
    entries, length = taken.header.total_entries, taken.header.total_length
    result.report(
        f"{out} holds {count(entries, 'entry')}, {length:,} bytes, in a file of {taken.size:,} "
        f"bytes (by {taken.means}){compared}",
        {
            "total_entries": entries,
            "total_length": length,
            "file_size": taken.size,
            "means": taken.means,
            "pages_compared": None if no_verify else taken.verified,
        },
    )
