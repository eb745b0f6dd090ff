"""The tutorial of data engineers, word for word, from an empty folder to a chart."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli import process
from tests.code_blocks import isolated
from tests.spark import settings
from tests.test_code_blocks import why_not

PAGE = settings.ROOT / "docs" / "tutorials" / "DATA_ENGINEER.md"
RUN = "from pathlib import Path; from tests.code_blocks import run; run(Path('../page'))"


@pytest.mark.soak
def test_from_nothing_to_a_chart(java: None, tmp_path: Path) -> None:
    if reason := why_not(tmp_path):
        pytest.skip(reason)
    text = PAGE.read_text()
    assert text.count("<!-- needs: Spark") == 3
    # Here is what they need.
    text = text.replace("<!-- needs: Spark -->\n", "").replace("<!-- needs: Spark; ", "<!-- ")
    (tmp_path / "page").write_text(text)
    (tmp_path / "here").mkdir()
    done = subprocess.run(
        isolated([sys.executable, "-c", RUN], tmp_path),
        cwd=tmp_path / "here",
        env={
            **process.ENVIRONMENT,
            **settings.ENVIRONMENT,
            "PATH": f"{sys.prefix}/bin:{os.environ['PATH']}",
            "PYTHONWARNINGS": "default",
        },
        capture_output=True,
        text=True,
        timeout=1200,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    for name in ("blocks", "senders"):
        chart = (tmp_path / "here" / "charts" / f"{name}.png").read_bytes()
        assert chart.startswith(b"\x89PNG")
    assert '"query": "transactions_per_block"' in done.stdout
