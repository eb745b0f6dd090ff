"""Checks everything that the format promises, in a file that may break any of it.

Acquires no lock and writes nothing. `verify` reports; `examine` also finds where the stream ends
or should end, for `repair.py`. Owns which pass over the file is believed (`examiner.py`).
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

from datastreamer.errors import DamagedEntry, StreamBusy
from datastreamer.format import U64_MAX
from datastreamer.storage.disk.bad_sectors import read_around
from datastreamer.storage.disk.file_ops import Disk, File, OsDisk
from datastreamer.storage.maintain.examiner import Examiner, Progress
from datastreamer.storage.maintain.report import Examination, Report
from datastreamer.storage.read.change_watch import ChangeWatch, steady_page
from datastreamer.storage.read.open_file import open_file, os_error

PathLike = str | os.PathLike[str]
_TRIES = 10


def verify(path: PathLike, *, progress: Progress | None = None) -> Report:
    """Check a stream file. Damage is reported, never raised.

    Beside a writer it checks what is visible. Raises `FileMissing`, `NotAStream` (a folder or
    device), `StreamFileError` if the file cannot be read at all, and `StreamBusy` if it is
    truncated faster than it can be checked.
    """
    disk = OsDisk()
    with opened(path, disk) as (file, name):
        return examine(file, name, disk, progress).report


@contextlib.contextmanager
def opened(path: PathLike, disk: Disk, *, write: bool = False) -> Iterator[tuple[File, str]]:
    """The file at `path`, and the path as text; bytes that the disk cannot read are zeros. Other
    errors of the system are raised as `StreamFileError`."""
    name = os.fspath(path)
    file = read_around(open_file(disk, name, name, write=write), name)
    try:
        yield file, name
    except OSError as error:
        raise os_error(name, error, "cannot be read") from error
    finally:
        file.close()


def examine(file: File, path: str, disk: Disk, progress: Progress | None = None) -> Examination:
    """The same for an open file, and more. `file` may hold the writer's lock.

    A pass over entries that are truncated meanwhile proves nothing: it is repeated, up to the
    truncation. Beside a writer, only what two passes find is a problem.
    """
    most: int | None = None
    suspected: set[tuple[str, object]] = set()
    changed = 0
    for _ in range(_TRIES):
        page = steady_page(file)
        watch = ChangeWatch(file, page)

        def report(done: int, size: int, watch: ChangeWatch = watch) -> None:
            watch.look()  # often enough: the page names the newest changes only
            if progress is not None:
                progress(done, size)

        examiner = Examiner(file, path, disk, page, report, most)
        examination, damaged = None, None
        try:
            examination = examiner.run()
        except DamagedEntry as error:
            # It may have been truncated a moment ago.
            damaged = error
        changes = watch.take()
        changed += changes.count
        claimed = None if examination is None else examination.claimed
        looked_at = U64_MAX if claimed is None else claimed.entries
        # A change may be why entries did not match the commit record that was read before it.
        unknown = changes.unknown or (examiner.unmatched and changes.count > 0)
        if unknown or (changes.lowest is not None and changes.lowest.start < looked_at):
            if changes.lowest is not None:
                most = min(changes.lowest.start, U64_MAX if most is None else most)
            continue
        if damaged is not None:
            if watch.page == page:
                raise damaged
            continue
        assert examination is not None
        found = examination.suspects
        if found <= suspected or (not examination.live and watch.page == page):
            return examination
        suspected = found
    raise StreamBusy(
        path,
        f"busy: the stream was truncated or updated {changed} times during {_TRIES} passes over "
        "it; nothing is known to be damaged: try again, or verify a snapshot",
    )
