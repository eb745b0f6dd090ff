"""Transactions that we write, read by the reference's client and opened by go-ethereum."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from datastreamer import DataStream, StreamServer
from datastreamer.zkevm import Sequencer
from datastreamer.zkevm.proto import datastream_pb2
from tests.interop.peer import SOURCE, GoPeer, PeerFailed, beside_reference, build
from tests.zkevm.typed import KEY, signed_types

pytestmark = beside_reference

TRANSACTION = 3


@pytest.fixture(scope="module")
def opener() -> Path:
    try:
        return build(SOURCE.with_name("opener"))
    except PeerFailed as error:
        pytest.skip(f"go-ethereum cannot be built: {error}")


def test_nodes_open_what_a_sequencer_writes(tmp_path: Path, account: Any, opener: Path) -> None:
    """Each type, from a raw transaction and from one in an RLP string."""
    signed = signed_types(account)
    path = tmp_path / "typed.bin"
    with DataStream.create(path, version=3, system_id=7, sync="os") as stream:
        with Sequencer(stream).batch() as batch, batch.block(timestamp=1) as block:
            for each in signed:
                block.tx(bytes(each.raw_transaction))
        total = stream.total_entries
    with (
        StreamServer(path, host="127.0.0.1", port=0) as server,
        GoPeer.client(server.addresses[0]) as client,
    ):
        client.start()
        entries = list(client.entries(total))
    encoded = [
        datastream_pb2.Transaction.FromString(bytes.fromhex(entry["data"])).encoded
        for entry in entries
        if entry["type"] == TRANSACTION
    ]
    lines = "".join(f"{each.hex()}\n" for each in encoded)
    done = subprocess.run(
        [opener], input=lines, check=True, capture_output=True, text=True, timeout=60
    )
    sender = account.from_key(KEY).address.lower()
    assert [json.loads(line) for line in done.stdout.splitlines()] == [
        {
            "type": kind,
            "hash": f"0x{bytes(each.hash).hex()}",
            "sender": sender,
            "authorities": [sender] if kind == 4 else [],
            "same": True,
        }
        for kind, each in enumerate(signed)
    ]
