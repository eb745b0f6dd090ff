"""Staging folders of Spark writes, and the removal of those that killed drivers left.

Owns their names, which identify the driver: a folder is in use while its driver runs.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import socket
import uuid
from typing import Final

from datastreamer.errors import StreamFileError
from datastreamer.storage.disk.file_ops import boot_id

_TRIES: Final = 100
_UNKNOWN: Final = "0-0"
_CREATED_BY: Final = re.compile(r"([0-9a-f]{8})-([0-9a-f]{8})-(\d+-\d+)-[0-9a-f]{12}")


def create(parent: str, stream: str) -> str:
    """Create a new folder in `parent`, for a write to the stream of this name.

    Removes those that killed drivers of this machine left there for this stream. Raises
    `StreamFileError` if it cannot be created.
    """
    prefix = f".{stream}.staging-"
    _remove_abandoned(parent, prefix)
    name = f"{prefix}{_machine()}-{_boot()}-{_driver()}-{uuid.uuid4().hex[:12]}"
    path = os.path.join(parent, name)
    try:
        os.makedirs(path)
    except OSError as error:
        raise StreamFileError(path, f"cannot be created: {error.strerror}") from None
    return path


def remove(path: str) -> None:
    """Remove a folder, even if a task is still writing files into it."""
    for _ in range(_TRIES):
        shutil.rmtree(path, ignore_errors=True)
        if not os.path.exists(path):
            return


def _remove_abandoned(parent: str, prefix: str) -> None:
    try:
        names = [name for name in os.listdir(parent) if name.startswith(prefix)]
    except OSError:
        return
    for name in names:
        created_by = _CREATED_BY.fullmatch(name.removeprefix(prefix))
        if created_by is not None and _has_ended(*created_by.groups()):
            remove(os.path.join(parent, name))


def _has_ended(machine: str, boot: str, driver: str) -> bool:
    """Whether a driver is known to have ended; unknown for a driver of another machine."""
    if machine != _machine() or driver == _UNKNOWN:
        return False
    return boot != _boot() or _process(int(driver.partition("-")[0])) != driver


def _machine() -> str:
    """This host and process id namespace, in which process ids are comparable."""
    try:
        processes = os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        processes = 0
    name = f"{socket.gethostname()} {processes}"
    return hashlib.blake2s(name.encode(), digest_size=4).hexdigest()


def _boot() -> str:
    return boot_id()[:4].hex()


def _driver() -> str:
    """The JVM of the Spark driver. This process is its child, and ends before the write does."""
    number = os.getppid()
    while number > 1:
        stat = _stat(number)
        if stat is None:
            break
        command, fields = stat
        if command == "java":
            return _process(number) or _UNKNOWN
        number = int(fields[1])
    return _UNKNOWN


def _process(number: int) -> str | None:
    """A process as its id and start time; None if it has ended."""
    stat = _stat(number)
    return None if stat is None or stat[1][0] == "Z" else f"{number}-{stat[1][19]}"


def _stat(number: int) -> tuple[str, list[str]] | None:
    """The command and the later fields of /proc/PID/stat."""
    try:
        with open(f"/proc/{number}/stat", encoding="utf-8", errors="replace") as source:
            before, _, fields = source.read().rpartition(")")
    except OSError:
        return None
    return before.partition("(")[2], fields.split()
