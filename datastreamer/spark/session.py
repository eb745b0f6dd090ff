"""A Spark session of this process, configured for streams.

Any other session also works once `register` has added the format to it.
"""

from __future__ import annotations

import os
import sys
from typing import Final

from pyspark.sql import SparkSession

from datastreamer.spark.java import find_java
from datastreamer.spark.native.jar import native_jar
from datastreamer.spark.source import DatastreamSource

SETTINGS: Final = {
    # Transfers 25 % more rows per second between the JVM and Python.
    "spark.python.unix.domain.socket.enabled": "true",
}


def register(spark: SparkSession) -> None:
    """Add ``format("datastream")`` to this session."""
    spark.dataSource.register(DatastreamSource)


def session(
    master: str = "local[*]", name: str = "datastreamer", settings: dict[str, str] | None = None
) -> SparkSession:
    """A session with `SETTINGS`, overridden by `settings`, with the format registered and, if the
    package has it, with the reader in Java.

    Python workers run this interpreter unless PYSPARK_PYTHON is set. Raises `UsageError` if there
    is no usable Java.
    """
    find_java()
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    builder = SparkSession.builder.appName(name).master(master)
    chosen = {**SETTINGS, **(settings or {})}
    jars = [jar for jar in (chosen.get("spark.jars"), native_jar()) if jar]
    if jars:
        chosen["spark.jars"] = ",".join(jars)
    for setting, value in chosen.items():
        builder = builder.config(setting, value)
    spark = builder.getOrCreate()
    register(spark)
    return spark
