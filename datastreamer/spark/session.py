"""A session of Spark in this process, set up for streams.

Owns the settings that pay here, and only those. A session from elsewhere does as well:
`register` makes the format known to it.
"""

from __future__ import annotations

import os
import sys
from typing import Final

from pyspark.sql import SparkSession

from datastreamer.spark.java import find_java
from datastreamer.spark.source import DatastreamSource

SETTINGS: Final = {
    # A quarter more rows a second between the JVM and Python.
    "spark.python.unix.domain.socket.enabled": "true",
}


def register(spark: SparkSession) -> None:
    """Make ``format("datastream")`` known to this session."""
    spark.dataSource.register(DatastreamSource)


def session(
    master: str = "local[*]", name: str = "datastreamer", settings: dict[str, str] | None = None
) -> SparkSession:
    """A session with `SETTINGS` and yours, to which the format is known.

    Python workers are started with this interpreter, unless PYSPARK_PYTHON says another one.
    Raises `UsageError`, in one line, where there is no Java for it.
    """
    find_java()
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    builder = SparkSession.builder.appName(name).master(master)
    for setting, value in {**SETTINGS, **(settings or {})}.items():
        builder = builder.config(setting, value)
    spark = builder.getOrCreate()
    register(spark)
    return spark
