"""What all Spark sessions of the tests share, also those of other processes."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Final

from datastreamer.spark.versions import VERSION

ROOT: Final = Path(__file__).resolve().parent.parent.parent

# A JVM that runs for seconds: optimising and verifying its code takes longer than running it. But
# Spark 4.0 lacks interfaces of the reader in Java, and only verifying notices where that matters.
_UNVERIFIED: Final = "-XX:+UnlockDiagnosticVMOptions -XX:-BytecodeVerificationRemote"

# Made by `class_archive.py`. Java warns of one of another Java or Spark, and does not use it.
CLASS_ARCHIVE: Final = Path(sys.prefix, "spark.jsa")
_SHARED: Final = f' -XX:SharedArchiveFile="{CLASS_ARCHIVE}" -Xlog:cds*=off,class+path=off'

ENVIRONMENT: Final = {
    "JDK_JAVA_OPTIONS": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC "
    + ("" if VERSION < (4, 1) else _UNVERIFIED)
    + (_SHARED if CLASS_ARCHIVE.exists() else ""),
    "SPARK_LOCAL_IP": "127.0.0.1",
    "PYTHONPATH": str(ROOT),
    "PYSPARK_PYTHON": str(ROOT / "tests" / "spark" / "worker_python.sh"),
    "TESTS_ROOT": str(ROOT),
    "TESTS_PYTHON": sys.executable,
}

SETTINGS: Final = {
    "spark.ui.enabled": "false",
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.driver.host": "127.0.0.1",
    "spark.driver.memory": "1g",
    "spark.sql.shuffle.partitions": "2",
}
