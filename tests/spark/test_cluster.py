"""Executors in their own processes, which have nothing of the driver but its pickles."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from datastreamer import arrow
from tests.spark.read.test_reading import write_chain
from tests.spark.settings import ENVIRONMENT, ROOT


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="finds the executor in /proc")
def test_a_killed_executor_changes_nothing(java: None, tmp_path: Path) -> None:
    path = tmp_path / "chain.bin"
    write_chain(path, 8)
    environment = {**os.environ, **ENVIRONMENT}
    environment.pop("SPARK_LOCAL_HOSTNAME", None)
    ran = subprocess.run(
        [sys.executable, "-m", "tests.spark.cluster_job", str(path)],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr[-3000:]
    result = json.loads(ran.stdout.splitlines()[-1])
    table = arrow.ArrowStream(path).reader().read_all()
    rows = list(zip(*(column.to_pylist() for column in table.columns), strict=True))
    expected = hashlib.sha256()
    for row in rows:
        digest = hashlib.sha256(repr(row).encode()).digest()[:8]
        expected.update(b"%d %d," % (row[0], int.from_bytes(digest, "big")))
    assert result["parts"] == 4
    assert result["rows"] == len(rows)
    assert result["digest"] == expected.hexdigest()
    # The killed one, and the one that Spark started in its place.
    assert result["executors"] == 2
    assert result["errors"] == 1
