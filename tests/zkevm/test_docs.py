"""The examples of docs/ZKEVM.md run unchanged."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from datastreamer import DataStream
from datastreamer.cli.demo import DemoSequencer
from datastreamer.zkevm import SequenceCheck

ROOT = Path(__file__).resolve().parent.parent.parent


def run(example: int, folder: Path) -> str:
    text = (ROOT / "docs" / "ZKEVM.md").read_text()
    done = subprocess.run(
        [
            sys.executable,
            "-W",
            "error",
            "-c",
            re.findall(r"```python\n(.*?)```", text, re.DOTALL)[example],
        ],
        check=False,
        capture_output=True,
        text=True,
        timeout=60,
        cwd=folder,
        env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_reading(tmp_path: Path) -> None:
    for package in ("rlp", "sha3", "coincurve"):
        pytest.importorskip(package, reason=f"{package} is not installed")
    with DataStream.create(tmp_path / "stream.bin", version=3, sync="os") as stream:
        sequencer = DemoSequencer(stream)
        for _ in range(3):
            sequencer.write()
    lines = run(0, tmp_path).splitlines()
    assert len(lines) == 6
    assert lines[2].startswith("1 1700000002 ")


def test_publishing(tmp_path: Path) -> None:
    assert run(1, tmp_path) == ""
    with DataStream.open(tmp_path / "new.bin", read_only=True) as stream:
        check = SequenceCheck(stream.header.version)
        for batch in stream.batches():
            check.feed(batch)
    assert check.report().ok
    assert check.report().events["Transaction"] == 1
