"""Verify and snapshot beside a process that truncates and updates every few milliseconds."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from datastreamer import DataStream
from datastreamer.storage.maintain.check import verify
from datastreamer.storage.maintain.snapshot import snapshot
from tests.storage import churning

# Raise it for a longer test.
RUNS = int(os.environ.get("DATASTREAMER_TEST_BUSY_RUNS", "8"))
BYTES = int(os.environ.get("DATASTREAMER_TEST_BUSY_BYTES", str(12 << 20)))


@pytest.fixture(params=[0, 20], ids=["all the time", "every 20 ms"])
def busy(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """A stream that another process truncates and updates."""
    path, states = tmp_path / "busy.bin", tmp_path / "states"
    words = [sys.executable, churning.__file__, path, states, str(BYTES), str(request.param)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            yield path
            assert process.poll() is None, "the writer ended"
        finally:
            process.kill()


def state_of(path: Path) -> str:
    """The state of a stream without a writer, as `churning.py` records it."""
    state = bytes(12)
    with DataStream.open(path, read_only=True) as stream:
        for batch in stream.batches():
            for entry in batch:
                state = churning.link(state, entry.type, entry.data)
        return f"{stream.total_entries} {state.hex()}"


def test_snapshots_beside_a_busy_writer(busy: Path, tmp_path: Path) -> None:
    """Every snapshot succeeds, is whole, and equals a state that the stream had."""
    found = []
    for number in range(RUNS):
        out = tmp_path / f"{number}.bin"
        snapshot(busy, out)
        assert verify(out).problems == []
        found.append(state_of(out))
        out.unlink()
    states = set((tmp_path / "states").read_text().splitlines())
    assert [state for state in found if state not in states] == []


def test_verify_beside_a_busy_writer(busy: Path) -> None:
    """No action of a healthy writer looks like damage."""
    reports = [verify(busy) for _ in range(RUNS)]
    assert [report.problems for report in reports] == [[]] * RUNS
    assert all(report.entries > 1000 for report in reports)
