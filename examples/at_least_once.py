"""Follow a stream and keep one's place in a file: each entry is dealt with at least once.

    python examples/at_least_once.py HOST PORT CURSOR [STOP]

The place is saved behind a batch when the next one is asked for. After a crash, the batch
that was underway comes again; nothing is left out. Lost connections need no care.
"""

from __future__ import annotations

import sys

from datastreamer import BlockingClient, EntryBatch, FileCursor


def deal_with(batch: EntryBatch) -> None:
    """What this program is for; here, to say what came."""
    print(f"entries {batch.first_number} to {batch.next_number - 1}", flush=True)


def follow(host: str, port: int, cursor: str, stop: int | None) -> None:
    """Go on where the last run stopped, without end or up to entry `stop`, not included."""
    with (
        BlockingClient(host, port, heartbeat=30) as client,
        client.batches(cursor=FileCursor(cursor), stop=stop) as batches,
    ):
        for batch in batches:
            deal_with(batch)


if __name__ == "__main__":
    host, port, cursor, *rest = sys.argv[1:]
    follow(host, int(port), cursor, int(rest[0]) if rest else None)
