"""What all Spark sessions of the tests share, also those of other processes."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parent.parent.parent

ENVIRONMENT: Final = {
    # A JVM that runs for seconds: optimising and verifying its code takes longer than running it.
    "JDK_JAVA_OPTIONS": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC -XX:+UnlockDiagnosticVMOptions "
    "-XX:-BytecodeVerificationRemote",
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
