"""The peer itself: what it says of recorded files is what was recorded of them."""

from __future__ import annotations

import hashlib
import re
import socket
from pathlib import Path

import pytest

from tests.conftest import GOLDEN, Golden, make_data
from tests.interop.peer import SOURCE, GoPeer, PeerFailed, beside_reference

pytestmark = beside_reference

# `crashed` is not a matter of calls; `empty` has none.
REPLAYED = [
    "boundary",
    "duplicates",
    "pages",
    "rollback",
    "small",
    "truncated",
    "unindexed",
    "updated",
]
RECORDED = sorted([*REPLAYED, "crashed", "empty"])


def test_is_the_release_that_was_recorded() -> None:
    (release,) = re.findall(r"zkevm-data-streamer (v[\d.]+)\n", (SOURCE / "go.mod").read_text())
    assert f"release {release} " in (GOLDEN / "README.md").read_text()


@pytest.mark.parametrize("name", RECORDED)
def test_serves_a_recorded_file(golden: Golden, name: str) -> None:
    manifest = golden.manifest(name)
    header = manifest["header"]
    with GoPeer.serve(golden.unpack(name)) as server:
        seen = server.get_header()
        assert seen == {k: header[k] for k in seen}
        assert not server.warnings
        if header["total_entries"]:
            read = GoPeer.read(server.address)
            assert read["entries"] == header["total_entries"]
            assert read["sha256"] == manifest["file"]["sha256_entries"]


@pytest.mark.parametrize("name", REPLAYED)
def test_makes_a_recorded_file_again(golden: Golden, tmp_path: Path, name: str) -> None:
    manifest = golden.manifest(name)
    path = tmp_path / "again.bin"
    create = manifest["create"]
    with GoPeer.serve(path, **create) as server:
        for step in manifest["operations"]:
            words: list[object] = []
            if "entry" in step:
                words.append(step["entry"])
            if "type" in step:
                words.append(step["type"])
            if "data" in step:
                words.append(make_data(step["data"]).hex() or "-")
            expected = step.get("result", {})
            if "error" in expected:
                with pytest.raises(PeerFailed, match=expected["error"]):
                    server.do(step["op"], *words)
            else:
                assert server.do(step["op"], *words) == expected
        for key, number in manifest["bookmarks_leveldb"].items():
            assert server.get_bookmark(bytes.fromhex(key)) == number
    shipped = manifest["file"]
    again = path.read_bytes()
    assert len(again) == shipped["size_as_written"]
    assert hashlib.sha256(again[: shipped["size"]]).hexdigest() == shipped["sha256"]


def test_asks_and_follows_its_own_server(tmp_path: Path) -> None:
    with GoPeer.serve(tmp_path / "own.bin", version=3, system_id=7, stream_type=5) as server:
        server.start_op()
        assert server.add_bookmark(b"\x01") == 0
        assert server.add_entry(9, b"first") == 1
        server.commit()
        assert server.first_event(b"\x01")["data"] == b"first".hex()
        with GoPeer.client(server.address, stream_type=5) as client:
            assert client.header() == server.get_header()
            assert client.entry(1) == {"number": 1, "type": 9, "length": 5, "data": b"first".hex()}
            assert client.bookmark(b"\x01")["number"] == 1
            with pytest.raises(PeerFailed, match="entry not found"):
                client.entry(2)
            client.start_bookmark(b"\x01")
            assert [e["number"] for e in client.entries(2)] == [0, 1]
            server.start_op()
            server.add_entry(0xFFFFFFFE, b"")
            server.add_bookmark(b"\x02")
            server.commit()
            # Its server may send an entry twice to who has just come.
            followed = {}
            while 3 not in followed:
                followed |= {e["number"]: e["type"] for e in client.entries(1)}
            assert followed == {2: 0xFFFFFFFE, 3: 0xB0}
            client.stop()
        assert server.between(b"\x01", b"\x02") == b"first"


def test_relays_its_own_server(tmp_path: Path) -> None:
    with GoPeer.serve(tmp_path / "main.bin") as server:
        server.append(20, bookmarks=True)
        with GoPeer.relay(server.address, tmp_path / "relay.bin") as relay:
            with GoPeer.client(relay.address) as client:
                while client.header()["total_entries"] < 120:
                    pass
                client.start(0)
                relayed = list(client.entries(120))
            assert [e["number"] for e in relayed] == list(range(120))
            assert relayed[-1] == server.get_entry(119)


def test_says_what_is_wrong(tmp_path: Path) -> None:
    bad = tmp_path / "bad.bin"
    bad.write_bytes(b"x" * 5000)
    with pytest.raises(PeerFailed, match="bad file format"):
        GoPeer.serve(bad)
    with pytest.raises(ValueError, match="dotted folder"):
        GoPeer.serve(tmp_path / "dot.ted" / "s.bin")
    with GoPeer.serve(tmp_path / "s.bin") as server:
        with pytest.raises(PeerFailed, match="not allowed"):
            server.commit()
        with pytest.raises(PeerFailed, match="nothing to read"):
            GoPeer.read(server.address)


def test_waits_no_longer_than_asked() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        with pytest.raises(PeerFailed, match="not done within"):
            GoPeer.read(silent.getsockname(), count=1, timeout=0.2)
        client = GoPeer.client(silent.getsockname())
        client.timeout = 0.2
        with client, pytest.raises(PeerFailed, match="no answer in"):
            client.header()


def test_notices_a_server_that_hangs_up() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as rude,
        GoPeer.client(rude.getsockname()) as client,
    ):
        connection, _ = rude.accept()
        connection.close()
        again, _ = rude.accept()  # it connects again by itself, which `read` calls a failure
        again.close()
        client.kill()
        assert any("close connection" in line for line in client.warnings)
