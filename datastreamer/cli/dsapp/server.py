"""`dsapp server`: serve a stream while writing demo blocks to it."""

from __future__ import annotations

import logging
import time
from typing import Annotated

from datastreamer.cli.demo import SYSTEM_ID, VERSION, DemoSequencer, progress, write_at_pace
from datastreamer.cli.dsapp.options import (
    FileOption,
    InactivityTimeoutOption,
    LogOption,
    PortOption,
    WriteTimeoutOption,
    limits_of,
)
from datastreamer.cli.shared.options import number_option
from datastreamer.cli.shared.server_options import MetricsOptions, log_serving
from datastreamer.cli.shared.signals import StopRequest
from datastreamer.format import DEFAULT_PORT
from datastreamer.service.embedded import StreamServer

_log = logging.getLogger(__name__)

# Time for streaming clients to receive everything after the last operation.
_DRAIN_SECONDS = 30.0

SleepOption = Annotated[int, number_option("MS", "Pause before each operation, in milliseconds.")]
OpersOption = Annotated[
    int, number_option("N", "Number of atomic operations to write; then the server exits.")
]


def server(
    *,
    port: PortOption = DEFAULT_PORT,
    file: FileOption = "datastream.bin",
    sleep: SleepOption = 0,
    opers: OpersOption = 1_000_000,
    writetimeout: WriteTimeoutOption = 0,
    inactivitytimeout: InactivityTimeoutOption = 120,
    metrics: MetricsOptions,
    log: LogOption = "info",
) -> None:
    """Serve a stream while writing demo blocks to it, then exit.

    Each operation is a batch with one block of one transaction, and their bookmarks. A new file
    has the fixed layouts of version 1; in an existing file numbering continues. At the end,
    streaming clients have 30 s to receive all entries.
    """
    metrics.address()
    with (
        StopRequest() as stop,
        StreamServer(
            file,
            port=port,
            version=VERSION,
            system_id=SYSTEM_ID,
            limits=limits_of(writetimeout, inactivitytimeout),
            metrics_port=metrics.metrics_port,
            metrics_host=metrics.metrics_host or None,
        ) as serving,
    ):
        stream = serving.stream
        log_serving(_log, file, stream, serving.addresses)
        sequencer = DemoSequencer(stream)
        began = time.monotonic()
        done = write_at_pace(sequencer, opers, sleep / 1000, stop, fixed=False)
        _log.info(
            "%s; the stream holds %d entries",
            progress(sequencer, done, opers, time.monotonic() - began),
            stream.total_entries,
        )
        if not stop.is_set() and not serving.drain(_DRAIN_SECONDS):
            _log.warning("a client did not receive all entries within %g s", _DRAIN_SECONDS)
