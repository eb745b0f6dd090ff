"""An embedded server in a process whose descriptors are unusual: few, or many."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import os, resource, socket, sys
from datastreamer import BlockingClient, StreamServer

for fd in map(int, sys.argv[2].split(",")) if sys.argv[2] else ():
    os.close(fd)
wanted = int(sys.argv[3])
if wanted:
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted + 200, hard))
kept = [os.open("/dev/null", os.O_RDONLY) for _ in range(wanted)]
with StreamServer(sys.argv[1], host="127.0.0.1", port=0) as server:
    with server.stream.atomic_op() as op:
        op.add_entry(1, b"data")
    with BlockingClient("127.0.0.1", server.port) as client:
        assert client.entry(0).data == b"data"
    assert server.drain(5)
    address = server.addresses
assert server.addresses == address
os._exit(7)
"""


@pytest.mark.parametrize(
    "closed, many", [("0", 0), ("0,1,2", 0), ("", 1200)], ids=["no stdin", "none", "many"]
)
def test_serves_and_ends(tmp_path: Path, closed: str, many: int) -> None:
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path / "stream.bin"), closed, str(many)],
        env={**os.environ, "PYTHONPATH": str(root)},
        timeout=60,
        check=False,
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stderr) == (7, "")
