"""A Spark session of this process, configured for streams.

Any other session also works once `register` has added the format to it.
"""

from __future__ import annotations

import logging
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any, Final

from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

from datastreamer.errors import UsageError
from datastreamer.spark.java import find_java
from datastreamer.spark.native.jar import native_jar
from datastreamer.spark.source import DatastreamSource
from datastreamer.spark.versions import VERSION

_log = logging.getLogger(__name__)

SETTINGS: Final = {
    # Transfers 25 % more rows per second between the JVM and Python.
    "spark.python.unix.domain.socket.enabled": "true",
}

LOCAL_SETTINGS: Final = {
    # Writes a checkpoint in two thirds of the time; on one machine nothing else may write it.
    "spark.sql.streaming.checkpointFileManagerClass": "org.apache.spark.sql.execution.streaming."
    f"{'' if VERSION < (4, 1) else 'checkpointing.'}FileSystemBasedCheckpointFileManager",
}
"""Settings of a session whose master is local, unless it has another file system than the local
one as its default."""


def register(spark: SparkSession) -> None:
    """Add ``format("datastream")`` to this session. Raises `UsageError` if the environment names a
    Python for Spark that cannot load this package."""
    try:
        spark.dataSource.register(DatastreamSource)
    except PySparkException as error:
        if error.getCondition() == "DATA_SOURCE_ALREADY_EXISTS":
            _register_in_4_0(spark)
            return
        _check_pythons()
        raise error


def _register_in_4_0(spark: SparkSession) -> None:
    """Register unless Spark has found the source itself: Spark 4.0 refuses it then, and beside the
    reader in Java, which has the same name."""
    try:
        java: Any = spark._jsparkSession
    except PySparkException:
        return  # of Spark Connect, whose server looks for sources itself
    from pyspark import SparkContext
    from pyspark.sql.udf import _wrap_function

    sources = java.sessionState().dataSourceManager()
    if not sources.dataSourceExists(DatastreamSource.name()):
        _check_pythons()
        jvm: Any = SparkContext._jvm
        package = jvm.org.apache.spark.sql.execution.datasources.v2.python
        wrapped = _wrap_function(spark.sparkContext, DatastreamSource)
        source = package.UserDefinedPythonDataSource(wrapped)
        sources.registerDataSource(DatastreamSource.name(), source)


def _check_pythons() -> None:
    for name in ("PYSPARK_DRIVER_PYTHON", "PYSPARK_PYTHON"):
        python = os.environ.get(name)
        if not python:
            continue
        try:
            words = [python, "-c", "import datastreamer.spark"]
            done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)
            why = done.stderr.strip().rpartition("\n")[2] if done.returncode else ""
        except OSError as error:
            why = error.strerror or str(error)
        if why:
            raise UsageError(
                f"{name} is {python}, which cannot load this package: {why}: unset it, or name a "
                f"Python that can, such as {sys.executable}"
            ) from None


def session(
    master: str = "local[*]", name: str = "datastreamer", settings: dict[str, str] | None = None
) -> SparkSession:
    """A session with `SETTINGS`, overridden by `settings`, with the format registered and, if the
    package has it, with the reader in Java.

    With a local master checkpoints are written in the way that is fast on local disks. The jar of
    the reader in Java joins the `spark.jars` of `settings` and of ``spark-defaults.conf``; where
    PYSPARK_SUBMIT_ARGS has ``--jars``, or spark-submit has started Java, add it there.

    Python workers run this interpreter unless PYSPARK_PYTHON is set. Raises `UsageError` if there
    is no usable Java.
    """
    find_java()
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    builder = SparkSession.builder.appName(name).master(master)
    given = settings or {}
    local = LOCAL_SETTINGS if _is_local(master, given) else {}
    chosen = {**SETTINGS, **local, **given}
    if _start_java({**chosen, "spark.master": master, "spark.app.name": name}):
        chosen.pop("spark.jars", None)
    for setting, value in chosen.items():
        builder = builder.config(setting, value)
    spark = builder.getOrCreate()
    register(spark)
    return spark


def _start_java(settings: dict[str, str]) -> bool:
    """Start the JVM with the jar among its own; False if it runs already. `spark.jars` of a later
    session would replace the jars that Java found itself, those of packages among them."""
    # A client of Spark Connect lacks these.
    from pyspark import SparkConf, SparkContext

    if SparkContext._gateway is not None:
        return False
    jar = native_jar()
    # What Spark's command line says of jars replaces this.
    if jar is not None and "--jars" not in shlex.split(os.environ.get("PYSPARK_SUBMIT_ARGS", "")):
        jars = settings.get("spark.jars", _default_jars())
        settings["spark.jars"] = f"{jars},{jar}" if jars else jar
    SparkContext._ensure_initialized(
        conf=SparkConf(loadDefaults=False).setAll(list(settings.items()))
    )
    found = SparkConf(_jvm=SparkContext._jvm).get("spark.jars", "")
    if jar is not None and Path(jar).name not in found:
        _log.warning("the reader in Java is not used: add %s to --jars", jar)
    return True


def _default_jars() -> str:
    """The `spark.jars` of ``spark-defaults.conf``; empty if it has none."""
    from pyspark.find_spark_home import _find_spark_home

    folder = os.environ.get("SPARK_CONF_DIR") or os.path.join(_find_spark_home(), "conf")
    try:
        text = Path(folder, "spark-defaults.conf").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
    found = re.findall(r"^\s*spark\.jars(?:\s*[=:]\s*|\s+)(\S+)\s*$", text, re.MULTILINE)
    return found[-1] if found else ""


def _is_local(master: str, settings: dict[str, str]) -> bool:
    """Whether paths without a scheme are on this machine's disks."""
    default = settings.get("spark.hadoop.fs.defaultFS", "file:")
    return master.startswith("local") and default.startswith("file:")
