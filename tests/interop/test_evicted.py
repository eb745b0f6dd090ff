"""Files whose first pages are in their archive alone, beside the reference."""

from __future__ import annotations

from pathlib import Path

import pytest

from datastreamer.cli.main import main
from datastreamer.service.embedded import StreamServer
from tests.archive.evicting import entries, made, marked_copy
from tests.interop.peer import GoPeer, PeerFailed, beside_reference
from tests.interop.plain import digest, scan

pytestmark = beside_reference


def test_it_refuses_a_marked_file_and_reads_from_a_server(tmp_path: Path) -> None:
    twin, url = made(tmp_path / "twin.bin", 5), (tmp_path / "archive").as_uri()
    marked = marked_copy(twin, tmp_path / "marked.bin", url, 3)
    before = marked.read_bytes()
    with pytest.raises(PeerFailed, match="bad file format"), GoPeer.serve(marked):
        pass
    assert marked.read_bytes() == before
    with StreamServer(marked, host="127.0.0.1", port=0, create=False) as server:
        read = GoPeer.read(("127.0.0.1", server.port))
        assert (read["entries"], read["sha256"]) == (len(entries(twin)), digest(scan(twin)))
    # With all its pages it is an ordinary file.
    assert main(["archive", "restore", url, str(marked), "--in-place"]) == 0
    with GoPeer.serve(marked) as theirs:
        read = GoPeer.read(theirs.address)
        assert read["sha256"] == digest(scan(twin))
