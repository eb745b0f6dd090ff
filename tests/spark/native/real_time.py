"""A sink of Real-Time Mode for tests and benchmarks: a file with a line for each row."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any


class Lines:
    """Writes when each row came, in Unix ns, and its number, behind what other batches wrote."""

    def __init__(self, path: Path) -> None:
        self._path = str(path)
        self._file: Any = None

    def open(self, partition: int, epoch: int) -> bool:
        self._file = open(self._path, "a", buffering=1, encoding="ascii")  # noqa: SIM115
        return True

    def process(self, row: Any) -> None:
        self._file.write(f"{time.time_ns()} {row.number}\n")

    def close(self, error: Exception | None) -> None:
        self._file.close()


def written(path: Path) -> list[tuple[int, int]]:
    """The lines, each as a time and a number."""
    lines = path.read_text().splitlines() if path.exists() else []
    return [(int(when), int(number)) for when, number in map(str.split, lines)]


def start(frame: Any, path: Path, checkpoint: Path, batch: str = "2 seconds") -> Any:
    """A query into that file."""
    return (
        frame.writeStream.outputMode("update")
        .foreach(Lines(path))
        .option("checkpointLocation", str(checkpoint))
        .trigger(realTime=batch)
        .start()
    )
