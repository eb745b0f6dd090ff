"""Messages, and what still works, if packages are missing."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent


def run(program: str) -> str:
    ran = subprocess.run(
        [sys.executable, "-c", program], check=True, capture_output=True, text=True, cwd=ROOT
    )
    return ran.stdout.strip()


@pytest.mark.parametrize("missing", ["pyarrow", "pyspark.sql.datasource"])
def test_without_a_package(missing: str) -> None:
    hide = f"import sys; sys.modules[{missing!r}] = None\n"
    printed = run(f"{hide}try: import datastreamer.spark\nexcept ImportError as e: print(e)")
    assert printed == (
        "Spark needs packages that are missing or too old: install it with "
        "pip install 'datastreamer[spark]'"
    )
    # Where Spark looks for formats, it finds none of ours, and no error.
    assert (
        run(f"{hide}import pyspark_datastream as m; print(hasattr(m, 'DefaultSource'))") == "False"
    )


def test_where_spark_looks() -> None:
    printed = run("import pyspark_datastream as m; print(m.DefaultSource.name())")
    assert printed == "datastream"
