"""Follow a stream and keep the position in a file: each entry is processed at least once.

    python examples/at_least_once.py HOST PORT CURSOR [STOP]

The position after a batch is saved when the next one is asked for. After a crash, the batch that
was in progress comes again; nothing is left out. The client handles lost connections.
"""

from __future__ import annotations

import sys

from datastreamer import BlockingClient, EntryBatch, FileCursor


def process(batch: EntryBatch) -> None:
    """What this program is for; here, it prints which entries arrived."""
    print(f"entries {batch.first_number} to {batch.next_number - 1}", flush=True)


def follow(host: str, port: int, cursor: str, stop: int | None) -> None:
    """Continue where the last run stopped, forever or up to, not including, entry `stop`."""
    with (
        BlockingClient(host, port, heartbeat=30) as client,
        client.batches(cursor=FileCursor(cursor), stop=stop) as batches,
    ):
        for batch in batches:
            process(batch)


if __name__ == "__main__":
    if len(sys.argv) < 4:
        sys.exit(__doc__)
    host, port, cursor, *rest = sys.argv[1:]
    follow(host, int(port), cursor, int(rest[0]) if rest else None)
