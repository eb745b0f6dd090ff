"""A process that forks: what its child has copies of stays the parent's."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.network.secure import HOST, Authority

READING = """
import os, sys
from datastreamer import BlockingClient, ServerTLS, StreamServer, client_tls
from datastreamer.errors import UsageError
path, ca, *pair = sys.argv[1:]
tls = ServerTLS(tuple(pair)) if pair else None
with StreamServer(path, host="127.0.0.1", port=0, sync="os", tls=tls) as server:
    with server.stream.atomic_op() as op:
        op.add_entries(1, [bytes(1000)] * 20_000)
    address, trust = server.addresses[0], client_tls(ca) if pair else False
    with (
        BlockingClient(*address, tls=trust, resume=False) as client,
        BlockingClient(*address, tls=trust, resume=False) as asking,
    ):
        batches = client.batches(from_entry=0, stop=20_000)
        got = len(next(batches))
        assert asking.entry(3).number == 3
        if (pid := os.fork()) == 0:
            matched = 0
            for use in (lambda: next(batches), lambda: asking.entry(3), client.header):
                try:
                    use()
                except UsageError as error:
                    matched += "this client belongs to the parent process" in str(error)
            client.stop()
            batches.close()
            client.close()
            asking.close()
            os._exit(matched)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 3
        assert got + sum(len(batch) for batch in batches) == 20_000
        assert asking.entry(3).number == 3
"""

PUBLISHING = """
import os, sys
from datastreamer import BlockingPublisher, Publishing, StreamServer
from datastreamer.errors import UsageError
path, token = sys.argv[1:]
with StreamServer(
    path, host="127.0.0.1", port=0, sync="os", in_process=True,
    publishing=Publishing(token_file=token)
) as server:
    with BlockingPublisher(*server.addresses[0], token="a token", lease=0.5) as publisher:
        with publisher.atomic_op() as op:
            op.add_entry(3, b"before")
        op = publisher.atomic_op()
        op.add_entry(3, b"open")
        pending = None
        if (pid := os.fork()) == 0:
            matched = 0
            for use in (
                op.commit, publisher.atomic_op, publisher.flush, publisher.resend, publisher.drop
            ):
                try:
                    use()
                except UsageError as error:
                    matched += "this publisher belongs to the parent process" in str(error)
            publisher.close()
            os._exit(matched)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 5
        op.commit()
        with publisher.atomic_op() as op:
            op.add_entry(3, b"after")
    found = [entry.data for entry in server.stream.entries()]
    assert found == [b"before", b"open", b"after"], found
"""


def run(script: str, *words: object) -> None:
    """A connection that is lost is reported on stderr."""
    done = subprocess.run(
        [sys.executable, "-Werror", "-Wignore::DeprecationWarning", "-c", script, *map(str, words)],
        check=False,
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("tls", [False, True])
def test_a_client_takes_nothing_from_its_parent(tls: bool, tmp_path: Path) -> None:
    """It raises, and whatever it ends or closes is its own."""
    authority = Authority(tmp_path, "forking")
    pair = authority.issue("server", HOST) if tls else ()
    run(READING, tmp_path / "stream.bin", authority.file, *pair)


def test_a_publisher_says_nothing_in_place_of_its_parent(tmp_path: Path) -> None:
    """Its operations, its lease and its connection stay the parent's."""
    token = tmp_path / "token"
    token.write_text("a token")
    token.chmod(0o600)
    run(PUBLISHING, tmp_path / "stream.bin", token)
