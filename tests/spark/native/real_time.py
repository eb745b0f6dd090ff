"""A sink of Real-Time Mode for tests and benchmarks: a file with a line for each row.

Spark gives a sink in Python its rows when the batch ends, so each row has the time at which the JVM
had it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any


class Lines:
    """Writes the time and the number of each row behind what other batches wrote."""

    def __init__(self, path: Path) -> None:
        self._path = str(path)
        self._file: Any = None

    def open(self, partition: int, epoch: int) -> bool:
        self._file = open(self._path, "a", buffering=1, encoding="ascii")  # noqa: SIM115
        return True

    def process(self, row: Any) -> None:
        self._file.write(f"{row.at} {row.number}\n")

    def close(self, error: Exception | None) -> None:
        self._file.close()


def written(path: Path) -> list[tuple[int, int]]:
    """The lines, each as a time of Python's `perf_counter_ns` and a number."""
    lines = path.read_text().splitlines() if path.exists() else []
    return [(int(when), int(number)) for when, number in map(str.split, lines)]


def start(frame: Any, path: Path, checkpoint: Path, batch: str = "2 seconds") -> Any:
    """A query into that file."""
    at = "cast(reflect('java.lang.System', 'nanoTime') as long) as at"
    return (
        frame.selectExpr("number", at)
        .writeStream.outputMode("update")
        .foreach(Lines(path))
        .option("checkpointLocation", str(checkpoint))
        .trigger(realTime=batch)
        .start()
    )
