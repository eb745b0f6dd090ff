"""`datastreamer archive restore`: a stream file from an archive."""

from __future__ import annotations

from typing import Annotated

import typer

from datastreamer.cli.shared.options import number_option
from datastreamer.cli.shared.output import JsonResult, count
from datastreamer.cli.shared.progress import ProgressBar
from datastreamer.cli.verbs.archive.arguments import GenerationOption, UrlArgument

OutArgument = Annotated[
    str, typer.Argument(metavar="FILE", help="Path of the stream file; it must not exist.")
]
ManifestOption = Annotated[int | None, number_option("N", "Restore the end of this manifest.")]
ToEntryOption = Annotated[
    int | None, number_option("N", "Restore the entries before entry N only.")
]


def restore(
    url: UrlArgument,
    file: OutArgument,
    *,
    generation: GenerationOption = None,
    manifest: ManifestOption = None,
    to_entry: ToEntryOption = None,
    result: JsonResult,
) -> None:
    """Make a stream file from an archive, with its checksums and bookmark index.

    Every page is compared with its checksum. FILE appears when it is complete; after an
    interruption, the same command continues. The file may lack the last entries that the stream
    had, so its epoch is a later one: clients and relays compare their last entries.

    Examples:
      datastreamer archive restore s3://bucket/mainnet stream.bin
      datastreamer archive restore s3://bucket/mainnet old.bin --generation 3
    """
    from datastreamer.archive.opened import OpenArchive
    from datastreamer.archive.restore import STAGING, restore

    if generation is not None and manifest is not None:
        raise typer.BadParameter("--generation and --manifest exclude each other")
    archive = OpenArchive.open(url)
    chosen = archive.chosen(number=manifest, generation=generation)
    left = f"{file}{STAGING} is left, and the same command continues it"
    with ProgressBar(f"restoring {file}", 1, left=left) as bar:
        made = restore(archive, file, chosen, to_entry=to_entry, advance=bar.reach)
    result.report(
        f"{file} holds {count(made.header.total_entries, 'entry')}, "
        f"{made.header.total_length:,} bytes; {count(made.fetched, 'page')} fetched of manifest "
        f"{chosen.number}, generation {chosen.generation}",
        {
            "manifest": chosen.number,
            "generation": chosen.generation,
            "total_entries": made.header.total_entries,
            "total_length": made.header.total_length,
            "pages_fetched": made.fetched,
        },
    )
