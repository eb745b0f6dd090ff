"""Folders in which a write of Spark puts its rows aside, and those that killed drivers left.

Owns their names, which say who made them: a folder is another write's as long as that one's
driver runs. Knows no rows and no stream.
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
_NOBODY: Final = "0-0"
_MADE_BY: Final = re.compile(r"([0-9a-f]{8})-([0-9a-f]{8})-(\d+-\d+)-[0-9a-f]{12}")


def make(beside: str, stream: str) -> str:
    """A folder of one's own in the folder `beside`, for a write to the stream of this name.

    Clears away what killed drivers of this machine left there of writes to it. Raises
    `StreamFileError` where it cannot be made.
    """
    prefix = f".{stream}.staging-"
    _clear_left(beside, prefix)
    name = f"{prefix}{_machine()}-{_boot()}-{_driver()}-{uuid.uuid4().hex[:12]}"
    path = os.path.join(beside, name)
    try:
        os.makedirs(path)
    except OSError as error:
        raise StreamFileError(path, f"cannot be made: {error.strerror}") from None
    return path


def clear(path: str) -> None:
    """Remove a folder, also where a task puts files into it meanwhile."""
    for _ in range(_TRIES):
        shutil.rmtree(path, ignore_errors=True)
        if not os.path.exists(path):
            return


def _clear_left(beside: str, prefix: str) -> None:
    try:
        names = [name for name in os.listdir(beside) if name.startswith(prefix)]
    except OSError:
        return
    for name in names:
        made_by = _MADE_BY.fullmatch(name.removeprefix(prefix))
        if made_by is not None and _is_gone(*made_by.groups()):
            clear(os.path.join(beside, name))


def _is_gone(machine: str, boot: str, driver: str) -> bool:
    """Whether a driver has ended for sure: of another machine nobody here can tell."""
    if machine != _machine() or driver == _NOBODY:
        return False
    return boot != _boot() or _process(int(driver.partition("-")[0])) != driver


def _machine() -> str:
    """This machine, or container of it: numbers of processes mean the same in it."""
    try:
        processes = os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        processes = 0
    told = f"{socket.gethostname()} {processes}"
    return hashlib.blake2s(told.encode(), digest_size=4).hexdigest()


def _boot() -> str:
    return boot_id()[:4].hex()


def _driver() -> str:
    """Spark's process: this one is a worker of it, and ends before the write does."""
    number = os.getppid()
    while number > 1:
        stat = _stat(number)
        if stat is None:
            break
        command, fields = stat
        if command == "java":
            return _process(number) or _NOBODY
        number = int(fields[1])
    return _NOBODY


def _process(number: int) -> str | None:
    """A process: its number, and when it was started; None where there is none."""
    stat = _stat(number)
    return None if stat is None or stat[1][0] == "Z" else f"{number}-{stat[1][19]}"


def _stat(number: int) -> tuple[str, list[str]] | None:
    """What Linux tells of a process: its command, and the fields behind that."""
    try:
        with open(f"/proc/{number}/stat", encoding="utf-8", errors="replace") as source:
            before, _, behind = source.read().rpartition(")")
    except OSError:
        return None
    return before.partition("(")[2], behind.split()
