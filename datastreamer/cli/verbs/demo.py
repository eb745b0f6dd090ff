"""`datastreamer demo`: write demo blocks to a stream."""

from __future__ import annotations

import time
from typing import Annotated

import typer

from datastreamer.cli import early_signals
from datastreamer.cli.demo import SYSTEM_ID, VERSION, DemoSequencer, progress, write_at_pace
from datastreamer.cli.shared.exit_codes import Failure, WorkInterrupted
from datastreamer.cli.shared.options import (
    FileArgument,
    SyncOption,
    fraction_option,
    number_option,
    size_option,
)
from datastreamer.cli.shared.output import JsonResult, count
from datastreamer.cli.shared.progress import ProgressBar
from datastreamer.cli.shared.signals import StopRequest
from datastreamer.errors import FileMissing
from datastreamer.storage.stream import DataStream
from datastreamer.storage.write.sync_policy import SyncPolicy

OpsOption = Annotated[
    int | None, number_option("N", "Number of atomic operations to write, one block each [1000].")
]
SizeOption = Annotated[
    int | None, size_option("Write until the stream has this size, such as 1GB.")
]
RateOption = Annotated[
    float,
    fraction_option(
        "R",
        "Operations per second; 0: as fast as possible.",
        least=0,
        most=1e9,
        unit="operations per second",
    ),
]
SeedOption = Annotated[int, number_option("N", "Seed of the blocks' content.")]
VersionOption = Annotated[
    int | None,
    number_option(
        "N",
        "Stream version of a new file: 1 fixed layouts, 2 and later protobuf [1].",
        most=255,
        least=1,
    ),
]


def demo(
    file: FileArgument,
    *,
    ops: OpsOption = None,
    size: SizeOption = None,
    rate: RateOption = 0.0,
    sync: SyncOption = "commit",
    seed: SeedOption = 0,
    stream_version: VersionOption = None,
    result: JsonResult,
) -> None:
    """Write the blocks of a demo sequencer to a stream.

    Creates a missing file; in an existing file, continues its numbers. Each operation is a batch
    with one block of one transaction, and their bookmarks, in the layouts of the stream version.

    Examples:
      datastreamer demo stream.bin --ops 1000
      datastreamer demo stream.bin --size 1GB --sync os
    """
    if size is not None and ops is not None:
        raise typer.BadParameter("--ops and --size exclude each other")
    if size is None and ops is None:
        ops = 1000
    with StopRequest() as stop, _open(file, stream_version, sync) as stream:
        sequencer = DemoSequencer(stream, seed)
        began = time.monotonic()

        def enough() -> bool:
            if size is None:
                bar.advance(1)
                return False
            bar.reach(stream.header.total_length, size)
            return stream.header.total_length >= size

        pause = 1 / rate if rate else 0.0
        with ProgressBar(f"writing {file}", ops or size or 0) as bar:
            done = write_at_pace(
                sequencer, ops, pause, stop, fixed=True, enough=enough, quiet=lambda: bar.shown
            )
        seconds = time.monotonic() - began
        total, length = stream.total_entries, stream.header.total_length
        text = f"{progress(sequencer, done, ops, seconds)}; {file} holds {count(total, 'entry')}"
        if stop.is_set() and not (done == ops or (size is not None and length >= size)):
            raise WorkInterrupted(f"{early_signals.reason(stop.number)}: {text}", stop.number)
        facts = {"operations": done, "seconds": round(seconds, 3)}
        result.report(text, facts | {"total_entries": total, "total_length": length})


def _open(file: str, version: int | None, sync: SyncPolicy) -> DataStream:
    try:
        stream = DataStream.open(file, sync=sync)
    except FileMissing:
        return DataStream.create(file, version=version or VERSION, system_id=SYSTEM_ID, sync=sync)
    if version not in (None, stream.header.version):
        stream.close()
        raise Failure(
            f"{file}: the stream version of the existing file is {stream.header.version}, not "
            f"{version}"
        )
    return stream
