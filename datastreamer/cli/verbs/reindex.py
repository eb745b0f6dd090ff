"""`datastreamer reindex`: the bookmark index, built again from the file."""

from __future__ import annotations

import threading

from datastreamer.cli.shared import logs
from datastreamer.cli.shared.exit_codes import Failure
from datastreamer.cli.shared.options import FileArgument
from datastreamer.cli.shared.progress import ProgressBar
from datastreamer.storage import bookmarks as bookmarks_package
from datastreamer.storage.bookmarks.keeper import BookmarkKeeper
from datastreamer.storage.bookmarks.registry import LMDB_ANEW
from datastreamer.storage.stream import DataStream

_LOOK_SECONDS = 0.1


def reindex(
    file: FileArgument,
) -> None:
    """Throw the bookmark index away and build it again from the stream.

    An index that is missing, behind or another file's mends itself when a writer opens the
    stream; this is for one that is in doubt all the same.
    """
    with (
        logs.damage_told_once(bookmarks_package.__name__),
        DataStream.open(file, index=LMDB_ANEW) as stream,
    ):
        rebuild(stream)
        logs.say(
            f"{file}: {len(stream.bookmarks):,} different bookmarks of {stream.total_entries:,} "
            "entries are indexed"
        )


def rebuild(stream: DataStream) -> None:
    """Build the stream's index again, with a progress bar."""
    bookmarks = stream.bookmarks
    failed: list[Exception] = []
    worker = threading.Thread(
        target=_rebuild, args=(bookmarks, failed), name="reindex", daemon=True
    )
    with ProgressBar(f"reading {stream.path}", stream.total_entries) as progress:
        worker.start()
        while worker.is_alive():
            worker.join(_LOOK_SECONDS)
            progress.reach(stream.total_entries - bookmarks.lag(), stream.total_entries)
    if failed:
        raise failed[0]
    if bookmarks.lag():
        raise Failure(
            f"{stream.path}: the bookmark index could not be built, {bookmarks.lag():,} entries "
            "are not in it; the log says why"
        )


def _rebuild(bookmarks: BookmarkKeeper, failed: list[Exception]) -> None:
    try:
        bookmarks.rebuild()
        bookmarks.wait()
    except Exception as error:  # noqa: BLE001 - whatever it is, the main thread raises it
        failed.append(error)
