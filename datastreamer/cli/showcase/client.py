"""One client of the showcase, a process of its own: ``HOST PORT STOP``.

Follows the stream from entry 0 up to, not including, entry STOP. Writes JSON lines to
standard output: how many entries it has, several times a second, and at the end what it
has seen. Times are nanoseconds of the system's monotonic clock, which all processes of
a machine share.
"""

from __future__ import annotations

import hashlib
import json
import sys
import time
from collections.abc import Sequence

from datastreamer.cli.shared.exit_codes import DONE, guard
from datastreamer.client.blocking import BlockingClient

_TELL_NS = 50_000_000


def main(arguments: Sequence[str]) -> int:
    """Follow, and report."""
    host, port, stop = arguments[0], int(arguments[1]), int(arguments[2])
    digest, receipts = hashlib.sha256(), list[tuple[int, int]]()
    told = caught_up = 0
    with BlockingClient(host, port, resume=False) as client:
        joined = time.monotonic_ns()
        head = client.header().total_entries
        for batch in client.batches(from_entry=0, stop=stop):
            now = time.monotonic_ns()
            receipts.append((batch.next_number, now))
            digest.update(batch.packed())
            if not caught_up and batch.next_number >= head:
                caught_up = time.monotonic_ns()
            if now - told >= _TELL_NS:
                told = now
                print(json.dumps({"entries": batch.next_number}), flush=True)
    report = {
        "entries": receipts[-1][0] if receipts else 0,
        "digest": digest.hexdigest(),
        "head": head,
        "joined": joined,
        "caught_up": caught_up,
        "receipts": receipts,
    }
    print(json.dumps(report), flush=True)
    return DONE


if __name__ == "__main__":
    sys.exit(guard(lambda: main(sys.argv[1:])))
