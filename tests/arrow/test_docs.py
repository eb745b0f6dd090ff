"""The examples of docs/ARROW.md run, and its table of tables is the code's."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from datastreamer import arrow
from datastreamer.arrow.opened import OPENED

ROOT = Path(__file__).resolve().parent.parent.parent
TEXT = (ROOT / "docs" / "ARROW.md").read_text()
EXAMPLES = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)


@pytest.mark.parametrize("example", range(len(EXAMPLES)))
def test_examples(example: int, real_stream: Path, tmp_path: Path) -> None:
    if "duckdb" in EXAMPLES[example]:
        for module in ("duckdb", "polars"):
            pytest.importorskip(module, reason=f"{module} is not installed: pip install '.[dev]'")
    shutil.copyfile(real_stream, tmp_path / "stream.bin")
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", EXAMPLES[example]],
        check=False,
        capture_output=True,
        text=True,
        timeout=60,
        cwd=tmp_path,
        env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"},
    )
    assert done.returncode == 0, done.stderr
    if example == 0:
        assert done.stdout.splitlines()[-1] == "11318"
    elif example == 1:
        assert done.stdout.splitlines() == ["11318", "[(11317, 57705)]"]
    else:
        assert done.stdout.splitlines() == ["465"]


def test_the_columns_of_opened_transactions() -> None:
    section = TEXT.split("## Opened transactions")[1].split("## Errors")[0]
    printed: dict[str, str] = {}
    for columns in re.findall(r"^\| (`.*?) \|", section, re.MULTILINE):
        for names, kind in re.findall(r"((?:`\w+`(?:, )?)+) (\w+)", columns):
            printed |= dict.fromkeys(re.findall(r"`(\w+)`", names), kind)
    assert printed == {field.name: str(field.type) for field in OPENED}


def test_the_tables_are_those_of_the_code() -> None:
    printed = {}
    for name, columns in re.findall(r"^\| `(\w+)` \|.*\| ([^|]*) \|$", TEXT, re.MULTILINE):
        if name not in arrow.NAMES:
            continue
        found: dict[str, str] = {}
        waiting: list[str] = []
        for column, kind in re.findall(
            r"`(\w+)`|\b(int64|int32|binary|string|bool|decimal128\(\d+, 0\))", columns
        ):
            if column:
                waiting.append(column)
            else:
                found |= dict.fromkeys(waiting, kind)
                waiting = []
        assert not waiting
        printed[name] = found
    assert printed == {
        name: {field.name: str(field.type) for field in arrow.schema(name)} for name in arrow.NAMES
    }
