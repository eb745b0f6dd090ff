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

LOCAL_SETTINGS: Final = {
    # Writes a checkpoint in two thirds of the time; on one machine nothing else may write it.
    "spark.sql.streaming.checkpointFileManagerClass": "org.apache.spark.sql.execution.streaming"
    ".checkpointing.FileSystemBasedCheckpointFileManager",
}
"""Settings of a session whose master is local, unless it has another file system than the local
one as its default."""


def register(spark: SparkSession) -> None:
    """Add ``format("datastream")`` to this session."""
    spark.dataSource.register(DatastreamSource)


def session(
    master: str = "local[*]", name: str = "datastreamer", settings: dict[str, str] | None = None
) -> SparkSession:
    """A session with `SETTINGS`, overridden by `settings`, with the format registered and, if the
    package has it, with the reader in Java.

    With a local master checkpoints are written in the way that is fast on local disks.

    Python workers run this interpreter unless PYSPARK_PYTHON is set. Raises `UsageError` if there
    is no usable Java.
    """
    find_java()
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    builder = SparkSession.builder.appName(name).master(master)
    given = settings or {}
    local = LOCAL_SETTINGS if _is_local(master, given) else {}
    chosen = {**SETTINGS, **local, **given}
    jars = [jar for jar in (chosen.get("spark.jars"), native_jar()) if jar]
    if jars:
        chosen["spark.jars"] = ",".join(jars)
    for setting, value in chosen.items():
        builder = builder.config(setting, value)
    spark = builder.getOrCreate()
    register(spark)
    return spark


def _is_local(master: str, settings: dict[str, str]) -> bool:
    """Whether paths without a scheme are on this machine's disks."""
    default = settings.get("spark.hadoop.fs.defaultFS", "file:")
    return master.startswith("local") and default.startswith("file:")
