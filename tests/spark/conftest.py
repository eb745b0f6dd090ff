"""One session of Spark for all tests: it takes longer to start than they take together."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest

from datastreamer.errors import UsageError
from tests.arrow.conftest import Make, make

pytest.importorskip("pyspark", reason="pyspark is not installed: pip install 'datastreamer[spark]'")

from datastreamer.spark import STATE_SETTINGS, find_java, session
from tests.spark.settings import ENVIRONMENT, SETTINGS

__all__ = ["Make", "make"]


@pytest.fixture(scope="session")
def java() -> None:
    """Skips, with one line, if there is no Java for Spark."""
    try:
        find_java()
    except UsageError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def spark(java: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A local session."""
    scratch = tmp_path_factory.mktemp("spark")
    os.environ.update(ENVIRONMENT)
    made = session(
        "local[2]",
        "tests",
        {
            **SETTINGS,
            "spark.sql.session.timeZone": "UTC",
            "spark.sql.warehouse.dir": str(scratch / "warehouse"),
            "spark.local.dir": str(scratch),
        },
    )
    made.sparkContext.setLogLevel("ERROR")
    yield made
    made.stop()


@pytest.fixture
def stateful(spark: Any) -> Iterator[Any]:
    """The session with the settings that streaming reassembly needs."""
    for setting, value in STATE_SETTINGS.items():
        spark.conf.set(setting, value)
    yield spark
    for setting in STATE_SETTINGS:
        spark.conf.unset(setting)
