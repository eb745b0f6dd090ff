"""A sequencer's stream in Spark: history and live tail, each entry once, and a report.

    python examples/spark_pipeline.py SOURCE OUT    a file, or HOST:PORT of a server
    python examples/spark_pipeline.py --demo OUT    a server of its own, with a running sequencer

The same as `datastreamer spark ingest` and `datastreamer spark report`, to be adapted.
Needs pip install 'datastreamer[spark,zkevm,charts]' and Java 17 or 21.
"""

from __future__ import annotations

import hashlib
import os
import random
import sys
import threading
from pathlib import Path
from typing import NamedTuple

import coincurve
import rlp
import sha3

from datastreamer import DatastreamerError, StreamServer
from datastreamer.spark import QUERIES, Ingest, draw, open_tables, session
from datastreamer.zkevm import Sequencer


def main() -> None:
    if len(sys.argv) != 3:
        raise SystemExit(__doc__)
    source, out = sys.argv[1:]
    try:
        if source == "--demo":
            demo(out)
        elif os.path.exists(source):
            pipeline({"path": source}, out)
        else:
            pipeline({"server": source}, out)
    except DatastreamerError as error:
        raise SystemExit(f"error: {error}") from None


class Live(NamedTuple):
    """How the pipeline and the demo's publisher notify each other."""

    following: threading.Event
    published: threading.Event


def pipeline(source: dict[str, str], out: str, live: Live | None = None) -> None:
    """Ingest the history, then new entries until all is `published`; print and draw a report."""
    settings = {
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.log.level": "ERROR",
        "spark.sql.session.timeZone": "UTC",
    }
    spark = session(settings=settings)
    try:
        ingest = Ingest(spark, source, out)
        print(f"history: {ingest.backfill():,} entries, up to {ingest.done:,}")
        if live is not None:
            live.following.set()
            for count in ingest.follow(2, live.published.wait):
                print(f"live: {count:,} entries, up to {ingest.done:,}")
            print(f"live: {ingest.backfill():,} entries, up to {ingest.done:,}")
        ingest.close()
        open_tables(spark, out)
        for query in QUERIES.values():
            print(f"\n{query.title}")
            spark.sql(query.sql).show(truncate=False)
        for path in draw(spark, Path(out) / "charts"):
            print(f"chart: {path}")
    finally:
        spark.stop()


def demo(out: str) -> None:
    """Run the pipeline on a sequencer that has a history and continues to publish."""
    os.makedirs(out, exist_ok=True)
    with StreamServer(
        Path(out) / "demo.bin", host="127.0.0.1", port=0, version=3, system_id=1101
    ) as server:
        publisher = Sequencer(server.stream, fork_id=9, atomic="batch")
        publish(publisher, 500)
        live = Live(threading.Event(), threading.Event())

        def publish_more() -> None:
            # Some batches while Spark starts and reads the history, and some while it follows.
            left = 20
            while left and not live.published.is_set():
                publish(publisher, 10)
                left -= live.following.is_set()
                live.published.wait(0.5)
            live.published.set()

        publishing = threading.Thread(target=publish_more)
        publishing.start()
        try:
            pipeline({"server": f"127.0.0.1:{server.port}"}, out, live)
        finally:
            live.published.set()
            publishing.join()


def publish(sequencer: Sequencer, batches: int) -> None:
    """Publish batches of one to three blocks, with up to four transactions each."""
    for _ in range(batches):
        with sequencer.batch() as batch:
            newest = batch.number
            chance = random.Random(newest)  # noqa: S311 - the same stream each time
            for at in range(chance.randint(1, 3)):
                seconds = 1_700_000_000 + 300 * newest + 90 * at + chance.randint(0, 60)
                root = hashlib.sha256(b"%d %d" % (newest, at)).digest()
                with batch.block(timestamp=seconds, hash=root, state_root=root) as block:
                    for _ in range(chance.randint(0, 4)):
                        block.tx(transaction(chance))


def transaction(chance: random.Random) -> bytes:
    """A signed transaction of one of a dozen senders."""
    fields = [
        chance.randint(0, 99),
        1_000_000_000,
        21_000 + 1_000 * chance.randint(0, 50),
        b"to" * 10,
        chance.randint(0, 10**18),
        b"",
    ]
    key = coincurve.PrivateKey.from_int(1 + min(chance.randint(0, 11), chance.randint(0, 11)))
    digest = sha3.keccak_256(rlp.encode(fields)).digest()
    signature = key.sign_recoverable(digest, hasher=None)
    r, s = (int.from_bytes(signature[at : at + 32], "big") for at in (0, 32))
    return rlp.encode([*fields, 27 + signature[64], r, s])


if __name__ == "__main__":
    main()
