"""The examples of docs/REASSEMBLY.md run as they stand."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent


def examples() -> list[str]:
    text = (ROOT / "docs" / "REASSEMBLY.md").read_text()
    return re.findall(r"```python\n(.*?)```", text, re.DOTALL)


def run(program: str) -> str:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", program],
        check=False,
        capture_output=True,
        text=True,
        timeout=60,
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_splitting_and_reassembling() -> None:
    told = run(examples()[0])
    assert told.startswith("b'id of the block, 32 bytes of it.' [(b'\\x01id of")
    assert told.count("tx") == 2
    assert told.endswith("{'one producer': 4}\n")


def test_ordering() -> None:
    assert run(examples()[1]).split("\n")[:3] == [
        "apply b'a1'",
        "apply b'a2'",
        (
            "back [(Block(number=2, hash=b'a2', parent=b'a1', weight=None), b'a2')] then "
            "[(Block(number=2, hash=b'b2', parent=b'a1', weight=None), b'b2'), "
            "(Block(number=3, hash=b'b3', parent=b'b2', weight=None), b'b3')]"
        ),
    ]
    assert len(examples()) == 2
