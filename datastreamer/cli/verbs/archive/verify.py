"""`datastreamer archive verify`: read an archive and check it."""

from __future__ import annotations

from contextlib import closing, nullcontext
from typing import Annotated

from datastreamer.cli.shared.exit_codes import DamageFound, write_out
from datastreamer.cli.shared.options import ReportOutput, number_option, text_option
from datastreamer.cli.shared.output import count, json_line, text_lines, wrapped
from datastreamer.cli.shared.progress import ProgressBar
from datastreamer.cli.verbs.archive.arguments import UrlArgument

SampleOption = Annotated[int | None, number_option("N", "Read N random objects only.", least=1)]
AgainstOption = Annotated[
    str | None, text_option("FILE", "Compare the newest manifest with this stream file, too.")
]


def verify(
    url: UrlArgument,
    *,
    sample: SampleOption = None,
    against: AgainstOption = None,
    output: ReportOutput,
) -> None:
    """Read an archive, and check every page: hashes, numbers, bookmarks, manifests.

    Exit code 3 if something is wrong.

    Examples:
      datastreamer archive verify s3://bucket/mainnet --sample 10
      datastreamer archive verify s3://bucket/mainnet --against stream.bin
    """
    from datastreamer.archive.archived_file import ArchivedFile
    from datastreamer.archive.check import check
    from datastreamer.storage.objects.opened import OpenArchive

    shape = output.chosen()
    with (
        closing(ArchivedFile(against)) if against else nullcontext() as source,
        ProgressBar(f"checking {url}", 1) as bar,
    ):
        found = check(OpenArchive.open(url), sample=sample, against=source, advance=bar.reach)
    facts = {
        "ok": not found.problems,
        "manifest": found.newest.number,
        "entries": found.newest.head.entries,
        "manifests": found.manifests,
        "objects": found.objects,
        "pages": found.pages,
        "problems": found.problems,
    }
    if shape == "jsonl":
        write_out(json_line(facts))
    else:
        read = (
            f"read {count(found.manifests, 'manifest')}, {count(found.objects, 'object')}, "
            f"{count(found.pages, 'page')}; {count(found.newest.head.entries, 'entry')} in the "
            "newest manifest"
        )
        lines = [f"{url}: {count(len(found.problems), 'problem')}", read]
        write_out(text_lines([*lines, *(part for it in found.problems for part in wrapped(it))]))
    if found.problems:
        raise DamageFound(
            f"{url}: {count(len(found.problems), 'problem')}; push the stream file to a new URL, "
            "or restore a generation that is whole (`datastreamer archive list`)"
        )
