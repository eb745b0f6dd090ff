"""`datastreamer archive restore`: a stream file from an archive."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from datastreamer.cli.shared.exit_codes import Failure
from datastreamer.cli.shared.options import number_option
from datastreamer.cli.shared.output import JsonResult, count
from datastreamer.cli.shared.progress import ProgressBar
from datastreamer.cli.verbs.archive.arguments import GenerationOption, UrlArgument
from datastreamer.format import PAGE_SIZE
from datastreamer.storage.stream import DataStream

if TYPE_CHECKING:
    from datastreamer.storage.objects.opened import OpenArchive

OutArgument = Annotated[
    str,
    typer.Argument(
        metavar="FILE", help="Path of the stream file; without --in-place it must not exist."
    ),
]
ManifestOption = Annotated[int | None, number_option("N", "Restore the end of this manifest.")]
ToEntryOption = Annotated[
    int | None, number_option("N", "Restore the entries before entry N only.")
]

FromPageOption = Annotated[
    int,
    number_option("P", "Leave the pages (1 MiB each) before page P in the archive."),
]
InPlaceOption = Annotated[
    bool,
    typer.Option(
        "--in-place", help="Bring the evicted pages of FILE back into it; no process may write it."
    ),
]
# Pages that are brought back at a time.
_MANY = 64


def restore(
    url: UrlArgument,
    file: OutArgument,
    *,
    in_place: InPlaceOption = False,
    generation: GenerationOption = None,
    manifest: ManifestOption = None,
    to_entry: ToEntryOption = None,
    from_page: FromPageOption = 0,
    result: JsonResult,
) -> None:
    """Make a stream file from an archive, with its checksums and bookmark index.

    Compares every page with its checksum. FILE appears when it is complete. It may lack the last
    entries that the stream had, so its epoch is raised: clients and relays compare their last
    entries.

    With --in-place, brings the evicted pages of FILE back from the archive, so that every program
    can read FILE. After an interruption, the same command continues in both cases.

    Examples:
      datastreamer archive restore s3://bucket/mainnet old.bin --generation 3
      datastreamer archive restore s3://bucket/mainnet stream.bin --in-place
    """
    from datastreamer.archive.restore import STAGING, restore
    from datastreamer.storage.objects.opened import OpenArchive

    if generation is not None and manifest is not None:
        raise typer.BadParameter("--generation and --manifest exclude each other")
    archive = OpenArchive.open(url)
    if in_place:
        if (generation, manifest, to_entry, from_page) != (None, None, None, 0):
            raise typer.BadParameter("--in-place restores the entries that FILE has, and no others")
        result.report(*_in_place(archive, file))
        return
    chosen = archive.chosen(number=manifest, generation=generation)
    left = f"{file}{STAGING} is left, and the same command continues it"
    with ProgressBar(f"restoring {file}", 1, left=left) as bar:
        made = restore(
            archive, file, chosen, to_entry=to_entry, from_page=from_page, advance=bar.reach
        )
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


def _in_place(archive: OpenArchive, file: str) -> tuple[str, dict[str, object]]:
    """Bring the evicted pages back; what was done."""
    with DataStream.open(file) as stream:
        pages = stream.parts.pages
        mark, floor = pages.mark, pages.floor_page
        if mark is not None and mark.archive_id.hex() != archive.id:
            raise Failure(f"{file}: its pages are in {mark.url}, which is another archive")
        left = "the same command continues"
        with ProgressBar(f"restoring {file}", floor * PAGE_SIZE, left=left) as bar:
            while (at := pages.floor_page) > 0:
                pages.bring_back(max(0, at - _MANY))
                bar.reach((floor - pages.floor_page) * PAGE_SIZE, floor * PAGE_SIZE)
    what = f"{file} has all pages; {count(floor, 'page')} fetched"
    return what, {"pages_fetched": floor}
