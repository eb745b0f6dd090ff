"""`datastreamer reindex`: rebuild the bookmark index from the file."""

from __future__ import annotations

import threading

from datastreamer.cli.shared import logs
from datastreamer.cli.shared.exit_codes import Failure
from datastreamer.cli.shared.options import FileArgument
from datastreamer.cli.shared.progress import ProgressBar
from datastreamer.storage.bookmarks.keeper import BookmarkKeeper
from datastreamer.storage.bookmarks.registry import LMDB_ANEW
from datastreamer.storage.stream import DataStream

_PROGRESS_SECONDS = 0.1


def reindex(file: FileArgument) -> None:
    """Delete the bookmark index and rebuild it from the stream.

    A writer that opens a stream repairs a missing or lagging index by itself; use this command
    if you suspect that the index is wrong. Of a damaged stream, the bookmarks in other pages are
    indexed, and the exit code is 1.
    """
    with (
        logs.hold_index_errors(),
        DataStream.open(file, index=LMDB_ANEW, verify="always") as stream,
    ):
        rebuild(stream)
        logs.say(
            f"{file}: indexed {len(stream.bookmarks):,} different bookmarks of "
            f"{stream.total_entries:,} entries"
        )


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
