"""A server in a process of its own, and the time that processors spend on it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from datastreamer import StreamServer

PROC = os.path.exists("/proc/self/stat")
"""False on systems without Linux's /proc: the time of another process is not known there."""


@contextmanager
def serving(path: Path) -> Iterator[tuple[StreamServer, int]]:
    """The server of a stream on a free port, and the id of the process that serves (0 without
    /proc). Other benchmarks of the same run may have children too: only the new one is meant."""
    before = _children()
    with StreamServer(path, host="127.0.0.1", port=0, sync="os", index="memory") as server:
        [pid] = _children() - before if PROC else {0}
        yield server, pid


def processor_seconds(pid: int) -> float:
    with open(f"/proc/{pid}/stat") as stat:
        fields = stat.read().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _children() -> set[int]:
    if not PROC:
        return set()
    with open(f"/proc/self/task/{os.getpid()}/children") as found:
        return {int(child) for child in found.read().split()}
