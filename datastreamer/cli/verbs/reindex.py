"""`datastreamer reindex`: rebuild the bookmark index from the file."""

from __future__ import annotations

import os
import shlex
import threading

from datastreamer.cli.shared import logs
from datastreamer.cli.shared.exit_codes import Failure
from datastreamer.cli.shared.options import FileArgument
from datastreamer.cli.shared.output import JsonResult, count
from datastreamer.cli.shared.progress import ProgressBar
from datastreamer.errors import DamagedEntry
from datastreamer.storage.bookmarks.keeper import BookmarkKeeper
from datastreamer.storage.bookmarks.lmdb import index_folder
from datastreamer.storage.bookmarks.registry import LMDB_ANEW
from datastreamer.storage.disk.file_ops import OsDisk
from datastreamer.storage.maintain.check import opened
from datastreamer.storage.stream import DataStream

_PROGRESS_SECONDS = 0.1


def reindex(file: FileArgument, *, result: JsonResult) -> None:
    """Delete the bookmark index and rebuild it.

    A writer that opens a stream repairs a missing or lagging index by itself; use this command
    if you suspect that the index is wrong. If the stream has damaged pages, keeps the index,
    because a new one would lack the bookmarks in these pages; without an index, builds one of the
    other pages. Exits with 1 in both cases.

    Examples:
      datastreamer reindex stream.bin
      datastreamer reindex stream.bin --log-level debug
    """
    ensure_readable(file)
    with (
        logs.hold_index_errors(),
        DataStream.open(file, index=LMDB_ANEW, verify="always") as stream,
    ):
        rebuild(stream)
        found, total = len(stream.bookmarks), stream.total_entries
        result.report(
            f"{file}: indexed {count(found, 'different bookmark')} of {count(total, 'entry')}",
            {"bookmarks": found, "total_entries": total},
        )


def ensure_readable(file: str) -> None:
    """Raise `Failure` if the stream has an index, and entries that cannot be read."""
    folder = index_folder(os.path.abspath(file))
    if not os.path.lexists(os.path.join(folder, "data.mdb")):
        return
    with opened(file, OsDisk()) as (stream_file, _):
        if stream_file.locked_elsewhere():
            return  # the open for writing says so
    try:
        stream = DataStream.open(file, read_only=True, index="memory", verify="always")
    except DamagedEntry:
        return  # the open for writing undoes an update that a crash interrupted
    with stream, ProgressBar(f"checking {file}", stream.total_entries) as progress:
        try:
            for batch in stream.batches():
                progress.advance(len(batch))
        except DamagedEntry as error:
            raise Failure(
                f"{error}; the index is kept, because a new one would lack the bookmarks there: "
                f"run `datastreamer repair {shlex.quote(file)} --from HOST:PORT` first, or remove "
                f"{folder} to build one without them"
            ) from None


def rebuild(stream: DataStream) -> None:
    """Rebuild the index of the stream, with a progress bar."""
    bookmarks = stream.bookmarks
    failed: list[Exception] = []
    worker = threading.Thread(
        target=_rebuild, args=(bookmarks, failed), name="reindex", daemon=True
    )
    with ProgressBar(f"reading {stream.path}", stream.total_entries) as progress:
        worker.start()
        while worker.is_alive():
            worker.join(_PROGRESS_SECONDS)
            progress.reach(stream.total_entries - bookmarks.lag(), stream.total_entries)
    if failed:
        raise failed[0]
    if bookmarks.lag():
        raise Failure(
            f"{stream.path}: the bookmark index could not be built: it lacks {bookmarks.lag():,} "
            "entries; see the log for the reason"
        )


def _rebuild(bookmarks: BookmarkKeeper, failed: list[Exception]) -> None:
    try:
        bookmarks.rebuild()
        bookmarks.wait()
        if bookmarks.damage is not None:
            raise bookmarks.damage
    except Exception as error:  # noqa: BLE001 - the main thread raises it
        failed.append(error)
