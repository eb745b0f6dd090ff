"""A store that accepts connections and never answers: Ctrl-C ends every command soon."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from datastreamer.storage.stream import DataStream
from tests.archive.stores import fill


@pytest.fixture
def hanging() -> Iterator[tuple[str, threading.Event]]:
    """The endpoint, and whether someone has asked it."""
    listener = socket.create_server(("127.0.0.1", 0))
    asked, kept = threading.Event(), []

    def accept() -> None:
        with suppress(OSError):
            while True:
                kept.append(listener.accept()[0])
                kept[-1].recv(1)
                asked.set()

    threading.Thread(target=accept, daemon=True).start()
    yield f"http://127.0.0.1:{listener.getsockname()[1]}", asked
    for each in (listener, *kept):
        each.close()


@pytest.mark.parametrize(
    "words",
    [
        ["archive", "push", "s.bin", "s3://bucket/x"],
        ["archive", "verify", "s3://bucket/x"],
        ["archive", "restore", "s3://bucket/x", "r.bin"],
        ["cat", "archive:s3://bucket/x"],
        ["serve", "s.bin", "--port", "0", "--archive", "s3://bucket/x"],
        [
            *[
                "relay",
                "--server",
                "127.0.0.1:1",
                "--file",
                "r.bin",
                "--port",
                "0",
                "--archive",
                "s3://bucket/x",
            ]
        ],
        [*["relay", "--file", "r.bin", "--port", "0", "--archive", "s3://bucket/x"]],
    ],
    ids=lambda words: words[words[0] == "archive"],
)
def test_a_signal_ends_it(
    hanging: tuple[str, threading.Event], tmp_path: Path, words: list[str]
) -> None:
    endpoint, asked = hanging
    with DataStream.create(tmp_path / "s.bin") as stream:
        fill(stream, 1.2)
    environment = {
        **os.environ,
        "AWS_ENDPOINT_URL": endpoint,
        "AWS_ACCESS_KEY_ID": "a-key",
        "AWS_SECRET_ACCESS_KEY": "a-secret",
        "AWS_REGION": "us-east-1",
    }
    process = subprocess.Popen(
        [sys.executable, "-m", "datastreamer", *words],
        cwd=tmp_path,
        env=environment,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert asked.wait(60)
    # A second one would end a server at once.
    process.send_signal(signal.SIGINT)
    began = time.monotonic()
    _, errors = process.communicate(timeout=60)
    seconds = time.monotonic() - began
    # (The store's own timeout is 30 s; a server waits 10 s for its last publication.)
    assert seconds < 25
    assert "Traceback" not in errors
    assert "secret" not in errors
    assert process.returncode == (0 if words[0] in ("serve", "relay") else 130)
