"""Every entry once although a server restarts in the middle of a batch."""

from __future__ import annotations

from pathlib import Path

from datastreamer import StreamServer
from datastreamer.server.limits import Limits
from tests.spark.stream.following import Driver

ENTRIES = 40_000


def test_a_server_that_is_started_anew_in_the_middle_of_a_batch(tmp_path: Path) -> None:
    path = tmp_path / "stream.bin"
    limits = Limits(grace=0)

    def serve(port: int) -> StreamServer:
        return StreamServer(
            path, host="127.0.0.1", port=port, sync="os", in_process=True, limits=limits
        )

    with serve(0) as server:
        with server.stream.atomic_op() as op:
            op.add_entries(2, [b"%d" % number * 250 for number in range(ENTRIES)])
        port = server.port
        driver = Driver(server=f"127.0.0.1:{port}")
        driver.offset = driver.reader.initialOffset()
        end = driver.planned()
        (part,) = driver.reader.partitions(driver.offset, end)
        driver.reader.stop()
        batches = driver.reader.read(part)
        found = [next(batches)]
    assert found[0].num_rows < ENTRIES / 2
    with serve(port):
        found += batches
    numbers = [number for batch in found for number in batch.column("number").to_pylist()]
    assert numbers == list(range(ENTRIES))
