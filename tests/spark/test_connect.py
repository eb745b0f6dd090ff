"""The examples of Spark Connect and of declarative pipelines, each with a server of its own."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pyspark
import pytest
from pyarrow import parquet

from tests.spark.settings import ENVIRONMENT, ROOT

pytestmark = [
    pytest.mark.soak,
    pytest.mark.skipif(
        find_spec("grpc_status") is None,
        reason="Spark Connect is not installed: pip install 'pyspark[connect]'",
    ),
]


def run(*words: str, cwd: Path, **variables: str) -> str:
    # The modules of Connect may be in a folder of their own.
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, **ENVIRONMENT, "PYTHONPATH": path, **variables}
    environment["PYSPARK_PYTHON"] = environment["PYSPARK_DRIVER_PYTHON"] = sys.executable
    ran = subprocess.run(
        words, cwd=cwd, env=environment, capture_output=True, text=True, timeout=280, check=False
    )
    assert ran.returncode == 0, (ran.stdout[-3000:], ran.stderr[-3000:])
    return ran.stdout


def test_connect(java: None, real_stream: Path, tmp_path: Path) -> None:
    program = str(ROOT / "examples" / "spark_connect.py")
    printed = run(sys.executable, program, "local[2]", str(real_stream), cwd=tmp_path)
    assert "11,318 blocks in 102 batches" in printed


def test_declarative_pipelines(java: None, real_stream: Path, tmp_path: Path) -> None:
    folder = tmp_path / "pipeline"
    shutil.copytree(ROOT / "examples" / "spark_declarative", folder)
    spec = folder / "spark-pipeline.yml"
    spec.write_text(spec.read_text().replace("/tmp/stream-pipeline", str(tmp_path / "storage")))
    home = Path(pyspark.__file__).parent
    for _ in range(2):
        run(
            *(str(home / "bin" / "spark-pipelines"), "run", "--spec", str(spec)),
            cwd=folder,
            STREAM=str(real_stream),
            SPARK_HOME=str(home),
            # Spark's launcher reads what Java prints about its options as a part of its command.
            JDK_JAVA_OPTIONS="",
        )
        # The second run finds nothing new.
        blocks = parquet.read_table(folder / "spark-warehouse" / "blocks")
        assert sorted(blocks.column("number").to_pylist()) == list(range(11_318))
    batches = parquet.read_table(folder / "spark-warehouse" / "batches")
    assert (batches.num_rows, sum(batches.column("blocks").to_pylist())) == (102, 11_318)
