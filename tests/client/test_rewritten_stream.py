"""A slow client while its server's stream is truncated and written anew."""

from __future__ import annotations

from pathlib import Path

import pytest

from datastreamer.client.blocking_client import BlockingClient
from datastreamer.errors import HistoryChanged
from datastreamer.protocol.resume import Rollback
from datastreamer.service.embedded import StreamServer
from datastreamer.storage.stream import DataStream

COUNT = 8000


def fill(stream: DataStream, what: bytes) -> None:
    while stream.total_entries < COUNT:
        with stream.atomic_op() as op:
            for _ in range(200):
                op.add_entry(7, what.ljust(4000, b"."))


@pytest.mark.parametrize("in_process", [False, True])
@pytest.mark.parametrize("reported", [False, True])
def test_it_has_no_mixture(tmp_path: Path, reported: bool, in_process: bool) -> None:
    """What it was sent by reference lies unread on its side when new entries of the same sizes
    are there; its last entries alone would all be new ones."""
    got: dict[int, bytes] = {}

    rolled_back: list[Rollback] = []

    def roll_back(rollback: Rollback) -> None:
        rolled_back.append(rollback)
        for number in range(rollback.to_entry, rollback.from_entry):
            del got[number]

    def rewrite(stream: DataStream, upto: int) -> None:
        stream.truncate(upto - 100)
        fill(stream, b"new")

    changed = False
    with StreamServer(
        tmp_path / "s.bin", host="127.0.0.1", port=0, sync="os", in_process=in_process
    ) as server:
        fill(server.stream, b"old")
        with BlockingClient("127.0.0.1", server.port) as client:
            batches = client.batches(stop=COUNT, on_rollback=roll_back if reported else None)
            rewritten = False
            try:
                for batch in batches:
                    got.update((entry.number, entry.data[:3]) for entry in batch)
                    if not rewritten and batch.next_number > 200:
                        rewritten = True
                        rewrite(server.stream, batch.next_number)
            except HistoryChanged as error:
                changed = True
                for number in range(error.first_differing or 0, error.next_entry):
                    del got[number]
        held = {
            entry.number: entry.data[:3] for batch in server.stream.batches(0) for entry in batch
        }
    # Where it began is before all that the client remembers, maybe.
    assert changed or rolled_back
    wrong = [number for number, data in got.items() if data != held[number]]
    assert wrong == []
    assert changed or len(got) == COUNT
