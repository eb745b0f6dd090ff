"""`datastreamer health`: whether a server serves, for probes and cron."""

from __future__ import annotations

import http.client
import time

from datastreamer.cli.shared.addresses import address_of
from datastreamer.cli.shared.exit_codes import Failure, write_out
from datastreamer.cli.shared.metrics_client import get
from datastreamer.cli.shared.options import ReportOutput, SourceArgument, SourceOptions
from datastreamer.cli.shared.output import count, json_line, text_lines
from datastreamer.errors import ProtocolViolation
from datastreamer.format import STREAM_TYPE_SEQUENCER


def health(source: SourceArgument, *, output: ReportOutput, options: SourceOptions) -> None:
    """Check that a server serves.

    SOURCE is the stream's port of a server, or its metrics port (then /readyz decides, so that a
    relay that lacks too many entries fails). Prints one line; exit code 0, or 1 if the server does
    not serve.

    Examples:
      datastreamer health 127.0.0.1:6900
      datastreamer health 127.0.0.1:9601 || systemctl restart datastreamer-relay
    """
    from datastreamer.client.blocking_client import BlockingClient

    shape = output.chosen()
    address = address_of(source)
    [server] = options.upstreams([address], source)
    kind = STREAM_TYPE_SEQUENCER if options.stream_type is None else options.stream_type
    began = time.perf_counter()
    try:
        with BlockingClient([server], resume=False, stream_type=kind) as client:
            entries: int | None = (total := client.header().total_entries)
        what = f"serves {count(total, 'entry')}"
    except ProtocolViolation as error:
        if "answers HTTP" not in str(error):
            raise
        answer, body = get(source, "/readyz")
        what, entries = body.decode("utf-8", "replace").strip(), None
        if answer.status != http.client.OK:
            raise Failure(f"{source}: {what}") from None
    seconds = time.perf_counter() - began
    if shape == "jsonl":
        facts = {"server": str(address), "state": what, "entries": entries}
        write_out(json_line(facts | {"seconds": round(seconds, 6)}))
    else:
        write_out(text_lines([f"{source}: {what} ({1000 * seconds:.1f} ms)"]))
