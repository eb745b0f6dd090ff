"""Relays as processes, killed at any moment, while the source appends, updates and truncates."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from datastreamer.service.embedded import StreamServer
from datastreamer.storage.stream import DataStream
from tests.ports import free_port
from tests.relay.relaying import new
from tests.relay.test_agreement import Writer, differing

pytestmark = pytest.mark.soak
SECONDS = float(os.environ.get("DATASTREAMER_SOAK_SECONDS", "60"))


class Process:
    """A relay in a process of its own, which is killed and started again."""

    def __init__(self, folder: Path, hop: int, upstream: int) -> None:
        self.file = folder / f"{hop}.bin"
        self.port = free_port()
        self._log = folder / f"{hop}.log"
        self._words = [
            *(sys.executable, "-m", "datastreamer", "relay", "--on-rewrite", "follow"),
            *("--server", f"127.0.0.1:{upstream}", "--file", str(self.file)),
            *("--host", "127.0.0.1", "--port", str(self.port)),
            *("--sync", random.choice(["os", "commit"])),
        ]
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        with open(self._log, "ab") as log:
            self._process = subprocess.Popen(self._words, stdout=log, stderr=log)

    def kill(self) -> None:
        assert self._process is not None
        assert self._process.poll() is None, self._log.read_text()[-2000:]
        self._process.send_signal(signal.SIGKILL)
        self._process.wait()


def agrees(path: Path, source: DataStream) -> bool:
    with DataStream.open(path, follow=True, index="memory") as ours:
        if ours.total_entries != source.total_entries:
            return False
        return differing(ours, source) == []


@pytest.mark.parametrize("seed", range(2))
def test_killed_relays_agree_in_the_end(tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    random.seed(seed)
    new(tmp_path / "source.bin").close()
    path = tmp_path / "source.bin"
    with StreamServer(path, host="127.0.0.1", port=0, sync="os", index="memory") as server:
        source, port = server.stream, server.port
        writer = Writer(source, chance)
        for _ in range(200):
            writer.append()
        relays: list[Process] = []
        for hop in range(3):
            relays.append(Process(tmp_path, hop, port))
            relays[-1].start()
            port = relays[-1].port
        try:
            end = time.monotonic() + SECONDS
            killed = time.monotonic() + 3
            while time.monotonic() < end:
                writer.step(truncates=chance.random() < 0.2)
                if chance.random() < 0.2:
                    time.sleep(chance.random() * 0.01)
                if time.monotonic() > killed:
                    killed = time.monotonic() + chance.uniform(0.5, 3)
                    relay = chance.choice(relays)
                    relay.kill()
                    relay.start()
            print(writer.updates, "updates of", source.total_entries, "entries")
            for relay in relays:
                until = time.monotonic() + 90
                while not agrees(relay.file, source):
                    assert time.monotonic() < until, f"{relay.file} differs"
                    time.sleep(0.2)
        finally:
            for relay in relays:
                relay.kill()
