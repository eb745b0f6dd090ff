"""`datastreamer archive list`: what an archive holds."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from datastreamer.cli.shared.exit_codes import write_out
from datastreamer.cli.shared.options import ReportOutput
from datastreamer.cli.shared.output import json_line, text_lines
from datastreamer.cli.verbs.archive.arguments import UrlArgument
from datastreamer.format import HEADER_PAGE_SIZE
from datastreamer.selection.times import moment_text

if TYPE_CHECKING:
    from datastreamer.storage.objects.manifest import ArchiveManifest


def list(url: UrlArgument, *, output: ReportOutput) -> None:  # noqa: A001 - the command's name
    """List what an archive holds: the last manifest of each generation, the newest first.

    A new generation begins with each truncation or update of archived entries. Shows the bytes of
    the entries, and of the objects that the manifest names.

    Examples:
      datastreamer archive list s3://bucket/mainnet
      datastreamer archive list s3://bucket/mainnet --json | jq .total_entries
    """
    from datastreamer.storage.objects.opened import OpenArchive

    facts = [_facts(manifest) for manifest in OpenArchive.open(url).generations()]
    if output.chosen() == "jsonl":
        write_out(b"".join(map(json_line, facts)))
        return
    rows = [
        f"{each['generation']:10}  {each['manifest']:8}  {each['time']}  "
        f"{each['total_entries']:13,}  {each['bytes']:17,}  {each['object_bytes']:17,}  "
        f"{each['ratio'] or '':5}  {each['reason']}"
        for each in facts
    ]
    title = (
        f"generation  manifest  {'time':24}  {'entries':>13}  {'bytes':>17}  {'in objects':>17}  "
        "ratio  reason"
    )
    write_out(text_lines([title, *rows]))


def _facts(manifest: ArchiveManifest) -> dict[str, Any]:
    length = manifest.head.length - HEADER_PAGE_SIZE
    # Rows may name parts of one object.
    size = sum({row.object: row.size for row in manifest.rows}.values())
    return {
        "generation": manifest.generation,
        "reason": manifest.reason,
        "manifest": manifest.number,
        "time": moment_text(manifest.time),
        "total_entries": manifest.head.entries,
        "total_length": manifest.head.length,
        "bytes": length,
        "object_bytes": size,
        "ratio": round(length / size, 2) if size else None,
        "segments": len(manifest.segments),
        "stream_id": manifest.stream.stream_id,
        "epoch": manifest.stream.epoch,
        "writer": f"{manifest.writer.host}:{manifest.writer.pid}",
    }
