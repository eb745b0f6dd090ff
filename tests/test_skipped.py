"""The last line of a run says which tests were skipped and why."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.programs import HOW_TO_GET

ROOT = Path(__file__).resolve().parent.parent


def test_a_missing_program_and_how_to_get_it(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "tests/test_links.py"]
    command.append("tests/interop/test_peer.py::test_is_the_release_that_was_recorded")
    environment = {**os.environ, "PATH": str(tmp_path)}
    run = subprocess.run(
        command, check=False, cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert run.stdout.splitlines()[-1] == (
        f"skipped tests: 1, because go is not on PATH: {HOW_TO_GET['go']}"
    )
