"""With any bit of the index flipped, every bookmark is found, at its entry."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.parametrize("count", [25, pytest.param(60, marks=pytest.mark.soak)])
@pytest.mark.parametrize("how", ["open", "running"])
def test_flipped_bits(tmp_path: Path, how: str, count: int) -> None:
    """In another process, which some damage to LMDB's own bytes can end."""
    words = ["tests.storage.bookmarks.flipping", tmp_path, "1", str(count), how]
    command = [sys.executable, "-m", *words]
    done = subprocess.run(command, cwd=ROOT, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout.splitlines()[-1:] + done.stderr.splitlines()[-5:]
    answers = [json.loads(line) for line in done.stdout.splitlines()]
    assert [answer for answer in answers if answer[1] not in (None, "began")] == []
    assert len(answers) == 2 * count
