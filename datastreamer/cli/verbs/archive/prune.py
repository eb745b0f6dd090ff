"""`datastreamer archive prune`: delete old manifests and objects of an archive."""

from __future__ import annotations

from datastreamer.cli.consent import Consent
from datastreamer.cli.shared.output import JsonResult, count
from datastreamer.cli.shared.progress import ProgressBar
from datastreamer.cli.verbs.archive.arguments import KeepOption, UrlArgument, days_text


def prune(
    url: UrlArgument, *, keep: KeepOption = "7d", consent: Consent, result: JsonResult
) -> None:
    """Delete old manifests of an archive, and unused objects.

    An object is unused if no remaining manifest names it. Keeps the newest 64 manifests, objects
    that are younger than 24 hours, and all entries of the newest manifest. On a terminal, asks;
    elsewhere, needs --yes.

    Examples:
      datastreamer archive prune s3://bucket/mainnet --dry-run
      datastreamer archive prune s3://bucket/mainnet --keep 30d --yes
    """
    from datastreamer.archive.check import prunable, prune
    from datastreamer.storage.objects.opened import OpenArchive

    archive = OpenArchive.open(url)
    found = prunable(archive, days_text(keep))
    facts = {
        "manifests": len(found.manifests),
        "objects": len(found.objects),
        "bytes": found.size,
    }
    what = (
        f"{count(len(found.manifests), 'manifest')} and {count(len(found.objects), 'object')} "
        f"of {found.size:,} bytes"
    )
    if consent.dry_run or not (found.manifests or found.objects):
        note = "--dry-run: nothing was deleted" if consent.dry_run else "nothing to delete"
        result.report(f"{url}: {what}; {note}", facts)
        return
    consent.require(f"{url}: this permanently deletes {what}, which no kept manifest needs")
    with ProgressBar(f"pruning {url}", 1, left="a later prune deletes the rest") as bar:
        prune(archive, found, bar.reach)
    result.report(f"{url}: deleted {what}", facts)
