"""The README's tour runs as it is printed."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def test_the_tour_runs(tmp_path: Path) -> None:
    text = (ROOT / "README.md").read_text()
    tour = re.findall(r"```python\n(.*?)```", text, re.DOTALL)[0]
    script = tmp_path / "tour.py"
    script.write_text(tour)
    done = subprocess.run(
        [sys.executable, "-W", "error", str(script)],
        check=False,
        capture_output=True,
        text=True,
        timeout=60,
        cwd=ROOT,
        env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"},
    )
    assert done.returncode == 0, done.stderr
    assert "3 3 b'another'" in done.stdout
    assert done.stderr == ""
