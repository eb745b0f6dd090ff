"""One session of Spark for all tests: it takes longer to start than they take together."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from datastreamer.errors import UsageError
from tests.arrow.conftest import Make, make

pytest.importorskip("pyspark", reason="pyspark is not installed: pip install 'datastreamer[spark]'")

from datastreamer.spark import find_java, session

QUICKLY = {"JDK_JAVA_OPTIONS": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"}
"""For a Java of a few seconds: it takes half the time if it does not optimise what it runs."""

ROOT = Path(__file__).resolve().parent.parent.parent

__all__ = ["Make", "make"]


@pytest.fixture(scope="session")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A local session; skips with one line where there is no Java for it."""
    try:
        find_java()
    except UsageError as error:
        pytest.skip(str(error))
    scratch = tmp_path_factory.mktemp("spark")
    os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
    os.environ.update(QUICKLY)
    # Python workers do not see this process's sys.path.
    os.environ["PYTHONPATH"] = str(ROOT)
    made = session(
        "local[2]",
        "tests",
        {
            "spark.ui.enabled": "false",
            "spark.driver.bindAddress": "127.0.0.1",
            "spark.driver.host": "127.0.0.1",
            "spark.driver.memory": "1g",
            "spark.sql.shuffle.partitions": "2",
            "spark.sql.session.timeZone": "UTC",
            "spark.sql.warehouse.dir": str(scratch / "warehouse"),
            "spark.local.dir": str(scratch),
        },
    )
    made.sparkContext.setLogLevel("ERROR")
    yield made
    made.stop()
