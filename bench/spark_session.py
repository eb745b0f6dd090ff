"""A session of Spark for benchmarks, on this machine alone."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from datastreamer.errors import UsageError

pytest.importorskip("pyspark", reason="pyspark is not installed: pip install '.[dev]'")

from datastreamer.spark import find_java, session

ROOT = Path(__file__).resolve().parent.parent
CORES = 2
"""Of the session."""


@contextmanager
def local_session(scratch: Path, settings: Mapping[str, str] | None = None) -> Iterator[Any]:
    """A worker for each of `CORES`, which write to `scratch`; skips where there is no Java."""
    try:
        find_java()
    except UsageError as error:
        pytest.skip(str(error))
    os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
    # Python workers do not see this process's sys.path.
    os.environ["PYTHONPATH"] = str(ROOT)
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    made = session(
        f"local[{CORES}]",
        "bench",
        {
            "spark.ui.enabled": "false",
            "spark.driver.bindAddress": "127.0.0.1",
            "spark.driver.host": "127.0.0.1",
            "spark.driver.memory": "2g",
            "spark.local.dir": str(scratch),
            **(settings or {}),
        },
    )
    made.sparkContext.setLogLevel("ERROR")
    yield made
    made.stop()
