"""A server sends evicted entries."""

from __future__ import annotations

from pathlib import Path

from datastreamer.service.embedded import StreamServer
from tests.archive.evicting import entries, fields, made, marked_copy
from tests.network.drivers import client_of_kind, kinds


@kinds
def test_from_the_beginning(kind: str, tmp_path: Path) -> None:
    twin = made(tmp_path / "twin.bin")
    url = (tmp_path / "archive").as_uri()
    wanted, marked = entries(twin), marked_copy(twin, tmp_path / "s.bin", url, 6)
    with (
        StreamServer(marked, host="127.0.0.1", port=0, create=False, in_process=True) as server,
        client_of_kind(kind, "127.0.0.1", server.port, resume=False) as client,
    ):
        found = [
            fields(each)
            for batch in client.batches(from_entry=0, stop=len(wanted))
            for each in batch
        ]
        assert found == wanted
        for number in range(0, len(wanted), 13):
            assert fields(client.entry(number)) == wanted[number]
        key = next(data for _, kind_of, data in wanted if kind_of == 176)
        assert client.bookmark(key).number > 0
