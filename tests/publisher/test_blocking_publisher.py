"""The publisher without Trio, against a server in a thread of this process."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from datastreamer import BlockingPublisher, Publishing, StreamServer
from datastreamer.errors import (
    StreamClosed,
)
from datastreamer.protocol.retry import Backoff

TOKEN = "a token"
QUICK = Backoff(0.001, 0.01)


@pytest.fixture
def token_file(tmp_path: Path) -> Path:
    path = tmp_path / "token"
    path.write_text(TOKEN)
    path.chmod(0o600)
    return path


@contextmanager
def served(path: Path, token_file: Path, **terms: Any) -> Iterator[StreamServer]:
    publishing = Publishing(token_file=token_file, **terms)
    with StreamServer(
        path, host="127.0.0.1", port=0, index="memory", in_process=True, publishing=publishing
    ) as server:
        yield server


def publisher_of(server: StreamServer, **options: Any) -> BlockingPublisher:
    options = {"token": TOKEN, "backoff": QUICK, **options}
    return BlockingPublisher("127.0.0.1", server.port, **options)


def put(publisher: BlockingPublisher, data: bytes) -> None:
    with publisher.atomic_op() as op:
        op.add_entry(3, data)


def contents(server: StreamServer) -> list[bytes]:
    return [entry.data for entry in server.stream.entries()]


def test_it_loads_no_trio() -> None:
    program = "import sys; from datastreamer import BlockingPublisher; print('trio' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", program], check=True, capture_output=True, text=True, timeout=60
    )
    assert done.stdout.strip() == "False"


@pytest.mark.parametrize("committed", [False, True])
def test_an_interrupt_leaves_no_half_of_an_operation(
    path: Path, token_file: Path, monkeypatch: pytest.MonkeyPatch, committed: bool
) -> None:
    """As by Ctrl-C, before or after the operation was handed to the publisher's thread."""
    result = Future.result

    def interrupted(future: Future[Any], timeout: float | None = None) -> Any:
        if committed:
            result(future, timeout)
        raise KeyboardInterrupt

    with served(path, token_file) as server, publisher_of(server) as publisher:
        op = publisher.atomic_op()
        op.add_entry(3, b"a" * 1000)
        with monkeypatch.context() as patched:
            patched.setattr(Future, "result", interrupted)
            with pytest.raises(KeyboardInterrupt):
                op.commit()
        op.roll_back()
        put(publisher, b"b" * 5000)
        found = contents(server)
        assert found[-1] == b"b" * 5000
        assert found[:-1] == [b"a" * 1000] * committed or not committed


def test_a_close_while_other_threads_wait_or_close(path: Path, token_file: Path) -> None:
    with served(path, token_file) as server:
        for turn in range(10):
            publisher = publisher_of(server, take_over=True)
            busy = threading.Barrier(2)

            def work(publisher: BlockingPublisher, busy: threading.Barrier) -> None:
                publisher.flush()
                busy.wait()
                while True:
                    publisher.flush()

            with ThreadPoolExecutor(3) as pool:
                working = pool.submit(work, publisher, busy)
                busy.wait()
                threading.Event().wait(turn * 0.001)
                closing = [pool.submit(publisher.close) for _ in range(2)]
                assert [each.result(20) for each in closing] == [None, None]
                with pytest.raises(StreamClosed):
                    working.result(20)
            with pytest.raises(StreamClosed):
                publisher.atomic_op().commit()
            publisher.close()
