"""The last step of the tutorial of payloads, in Spark; `test_code_blocks.py` runs the others."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from datastreamer import StreamServer
from tests.code_blocks import RUN, code_blocks

PAGE = Path(__file__).resolve().parents[3] / "docs" / "tutorials" / "PAYLOADS.md"


# What the steps between publish, to a server.
PUBLISHED = """
python chain.py 41 70 a 0 | datastreamer split alice.bin
python chain.py 68 71 b 0 | datastreamer split alice.bin
"""


def test_both_producers(
    spark: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    blocks = list(code_blocks(PAGE.read_text()))
    monkeypatch.setenv("PATH", f"{sys.prefix}/bin:{os.environ['PATH']}")
    script = blocks[0].text + blocks[1].text + PUBLISHED
    subprocess.run([*RUN["sh"], script], cwd=tmp_path, check=True)
    [step] = [block for block in blocks if block.mark == "needs: Spark"]
    with StreamServer(tmp_path / "alice.bin", host="127.0.0.1", port=0) as server:
        text = step.text.replace("127.0.0.1:6900", f"127.0.0.1:{server.port}")
        # Python workers are in another folder.
        text = text.replace("bob.bin", str(tmp_path / "bob.bin"))
        exec(compile(text, str(PAGE), "exec"), {})
    shown = capsys.readouterr().out
    assert "74 blocks, of both branches" in shown
    assert "|conflict|value|    1|" in shown
