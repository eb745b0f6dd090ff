"""`session` adds the reader in Java to what the user has configured."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any, Final

import pytest

from datastreamer.spark import native_jar
from tests.spark.conftest import Make
from tests.spark.settings import ENVIRONMENT, ROOT

pytestmark = pytest.mark.skipif(native_jar() is None, reason="no reader in Java: make jar")

JOB: Final = """
import json, sys
from datastreamer.spark import session
from tests.spark.settings import SETTINGS

spark = session("local[1]", "jars", SETTINGS)
spark.sparkContext.setLogLevel("OFF")
frame = spark.read.format("datastream").load(sys.argv[1])
print(json.dumps({
    "jars": spark.sparkContext.getConf().get("spark.jars"),
    "native": "datastream (native)" in frame._jdf.queryExecution().executedPlan().toString(),
    "rows": [bytes(row.data).decode() for row in frame.collect()],
}))
spark.stop()
"""


@pytest.fixture
def other(tmp_path: Path) -> Path:
    """A jar of the user's."""
    path = tmp_path / "other.jar"
    with zipfile.ZipFile(path, "w") as made:
        made.writestr("a.txt", "")
    return path


def ran(path: Path, **environment: str) -> tuple[dict[str, Any], str]:
    """What the job found, and what it wrote to stderr."""
    done = subprocess.run(
        [sys.executable, "-c", JOB, path],
        cwd=ROOT,
        env={**os.environ, **ENVIRONMENT, **environment},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1]), done.stderr


def test_jars_of_the_configuration_remain(java: None, make: Make, other: Path) -> None:
    """Also with a file that a JVM in the locale C cannot name: Python reads it."""
    (other.parent / "spark-defaults.conf").write_text(f"spark.jars   {other}\n")
    path = make([(9, b"one"), (9, b"two")]).rename(other.with_name("\N{SNOWMAN}.bin"))
    found, _ = ran(path, SPARK_CONF_DIR=str(other.parent), LC_ALL="C")
    assert [Path(jar).name for jar in found["jars"].split(",")] == [
        "other.jar",
        "datastreamer-spark.jar",
    ]
    assert (found["native"], found["rows"]) == (True, ["one", "two"])


def test_jars_of_the_command_line_remain(java: None, make: Make, other: Path) -> None:
    found, said = ran(make([(9, b"one")]), PYSPARK_SUBMIT_ARGS=f"--jars {other} pyspark-shell")
    assert Path(found["jars"]).name == "other.jar"
    assert (found["native"], found["rows"]) == (False, ["one"])
    assert f"the reader in Java is not used: add {native_jar()} to --jars" in said
