"""A process that appends, truncates and updates a stream, as fast as it is asked to, and writes
down every state that the stream had: ``python churning.py STREAM STATES BYTES MILLISECONDS``."""

from __future__ import annotations

import random
import sys
import time
from hashlib import blake2b

from datastreamer import DataStream
from datastreamer.format import TYPE_BOOKMARK


def link(before: bytes, kind: int, data: bytes) -> bytes:
    """The state after one more entry."""
    return blake2b(before + kind.to_bytes(4, "big") + data, digest_size=12).digest()


def main(path: str, states: str, least: int, pause: float) -> None:
    chance = random.Random(17)
    chain, made = [bytes(12)], 0
    with DataStream.create(path, sync="os") as stream, open(states, "w", buffering=1) as reported:

        def note() -> None:
            reported.write(f"{len(chain) - 1} {chain[-1].hex()}\n")

        def append(operations: int) -> None:
            nonlocal made
            for _ in range(operations):
                entries = [(TYPE_BOOKMARK, b"%d" % made)]
                for _ in range(chance.randrange(1, 40)):
                    made += 1
                    entries.append((1, b"%d" % made + bytes(chance.randrange(3000))))
                for kind, data in entries:
                    chain.append(link(chain[-1], kind, data))
                # First: a reader may see the operation before the call returns.
                note()
                with stream.atomic_op() as op:
                    for kind, data in entries:
                        if kind == TYPE_BOOKMARK:
                            op.add_bookmark(data)
                        else:
                            op.add_entry(kind, data)

        note()
        while stream.header.total_length < least:
            append(10)
        print("ready", flush=True)
        total = stream.total_entries
        while True:
            if chance.random() < 0.2:
                number = chance.randrange(stream.total_entries - 200, stream.total_entries)
                entry = stream.entry(number)
                if entry.type != TYPE_BOOKMARK:
                    made += 1
                    data = (b"%d" % made).ljust(len(entry.data), b"u")[: len(entry.data)]
                    kept = [stream.entry(n) for n in range(number + 1, stream.total_entries)]
                    del chain[number + 1 :]
                    for kind, it in [(entry.type, data), *((e.type, e.data) for e in kept)]:
                        chain.append(link(chain[-1], kind, it))
                    note()
                    stream.update_entry(number, entry.type, data)
            else:
                back = chance.choice([1, 5, 50, 500, 3000])
                del chain[max(1, len(chain) - back) :]
                note()
                stream.truncate(len(chain) - 1)
                while stream.total_entries < total:
                    append(5)
            time.sleep(pause)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), float(sys.argv[4]) / 1000)
