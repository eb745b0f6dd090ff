"""`datastreamer archive push`: archive a stream file once."""

from __future__ import annotations

from contextlib import closing
from typing import Annotated

import typer

from datastreamer.cli.shared.options import FileArgument
from datastreamer.cli.shared.output import JsonResult, count
from datastreamer.cli.shared.progress import ProgressBar
from datastreamer.cli.verbs.archive.arguments import UrlArgument

TakeoverOption = Annotated[
    bool,
    typer.Option(
        "--archive-takeover",
        help="Replace the archive's entries where the file has others, and push although another "
        "file was archived there a short time ago.",
    ),
]


def push(
    file: FileArgument,
    url: UrlArgument,
    *,
    archive_takeover: TakeoverOption = False,
    result: JsonResult,
) -> None:
    """Archive a stream file, up to its last durable commit.

    Other programs may write and serve FILE meanwhile. Uploads only pages that the archive does
    not have, and compares each with its checksum. Credentials come from the environment.

    Examples:
      datastreamer archive push stream.bin s3://bucket/mainnet
      datastreamer archive push stream.bin file:///backup/mainnet
    """
    from datastreamer.archive.archived_file import ArchivedFile
    from datastreamer.archive.writer import ArchiveWriter
    from datastreamer.storage.objects.store import Store

    left = "the archive is as it was"
    with (
        closing(ArchivedFile(file)) as source,
        ProgressBar(f"archiving {file}", 1, left=left) as bar,
    ):
        publisher = ArchiveWriter(source, Store(url), takeover=archive_takeover)
        news = publisher.publish(bar.reach)
        manifest = publisher.newest
    assert manifest is not None
    what = f"uploaded {publisher.uploaded:,} bytes" if news else "nothing new"
    result.report(
        f"{url} holds {count(manifest.head.entries, 'entry')} of {file} in manifest "
        f"{manifest.number}, generation {manifest.generation}; {what}",
        {
            "manifest": manifest.number,
            "generation": manifest.generation,
            "total_entries": manifest.head.entries,
            "uploaded_bytes": publisher.uploaded,
        },
    )
