"""`datastreamer demo`: a made-up sequencer that writes a stream."""

from __future__ import annotations

import math
import time
from typing import Annotated

import typer

from datastreamer.cli.demo.pace import progress, write_at_pace
from datastreamer.cli.demo.sequencer import SYSTEM_ID, VERSION, DemoSequencer
from datastreamer.cli.shared import logs
from datastreamer.cli.shared.exit_codes import Failure
from datastreamer.cli.shared.options import (
    FileArgument,
    number_option,
)
from datastreamer.cli.shared.signals import stop_on_signal
from datastreamer.errors import FileMissing
from datastreamer.storage.stream import DataStream


def _read_rate(value: str | float) -> float:
    try:
        rate = float(value)
    except ValueError:
        rate = -1.0
    if not 0 <= rate < math.inf:
        raise typer.BadParameter(f"it is operations a second, 0 or more, not {value!r}")
    return rate


OpsOption = Annotated[
    int,
    number_option("--ops", "N", "Atomic operations to write, a block each."),
]
RateOption = Annotated[
    float,
    typer.Option(
        "--rate",
        parser=_read_rate,
        metavar="R",
        help="Operations a second; 0: as fast as the disk takes them.",
    ),
]
SeedOption = Annotated[
    int,
    number_option("--seed", "N", "The same seed writes the same bytes."),
]
VersionOption = Annotated[
    int | None,
    number_option(
        "--stream-version",
        "N",
        "Of a new file: 1 fixed layouts, from 2 on protobuf [1].",
        most=255,
        least=1,
    ),
]


def demo(
    file: FileArgument,
    ops: OpsOption = 1000,
    rate: RateOption = 0.0,
    seed: SeedOption = 0,
    stream_version: VersionOption = None,
) -> None:
    """Write a made-up sequencer's blocks to a stream.

    The file is made if it is missing. Each operation is a batch with a block of one
    transaction, and their bookmarks, in the layouts of the stream's version; numbers go on
    from what the file holds.
    """
    with stop_on_signal() as ending, _open(file, stream_version) as stream:
        sequencer = DemoSequencer(stream, seed)
        began = time.monotonic()
        done = write_at_pace(sequencer, ops, 1 / rate if rate else 0.0, ending, fixed=True)
        logs.say(
            f"{progress(sequencer, done, ops, time.monotonic() - began)}; {file} holds "
            f"{stream.total_entries:,} entries"
        )


def _open(file: str, version: int | None) -> DataStream:
    try:
        stream = DataStream.open(file)
    except FileMissing:
        return DataStream.create(file, version=version or VERSION, system_id=SYSTEM_ID)
    if version not in (None, stream.header.version):
        stream.close()
        raise Failure(
            f"{file}: a stream of version {stream.header.version}, not {version}; an existing "
            "file brings its own"
        )
    return stream
