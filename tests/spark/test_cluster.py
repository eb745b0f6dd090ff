"""Executors of their own, with nothing of the driver's but its pickles."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from datastreamer import arrow
from datastreamer.errors import UsageError
from datastreamer.spark import find_java
from tests.spark.conftest import QUICKLY, ROOT
from tests.spark.read.test_reading import write_chain


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="finds the executor in /proc")
def test_an_executor_that_dies_changes_nothing(tmp_path: Path) -> None:
    try:
        find_java()
    except UsageError as error:
        pytest.skip(str(error))
    path = tmp_path / "chain.bin"
    write_chain(path, 30)
    environment = {
        **os.environ,
        **QUICKLY,
        "SPARK_LOCAL_IP": "127.0.0.1",
        "PYTHONPATH": str(ROOT),
        "PYSPARK_PYTHON": sys.executable,
    }
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
    told = json.loads(ran.stdout.splitlines()[-1])
    table = arrow.ArrowStream(path).reader().read_all()
    rows = list(zip(*(column.to_pylist() for column in table.columns), strict=True))
    expected = hashlib.sha256()
    for row in rows:
        digest = hashlib.sha256(repr(row).encode()).digest()[:8]
        expected.update(b"%d %d," % (row[0], int.from_bytes(digest, "big")))
    assert told["parts"] == 10
    assert told["rows"] == len(rows)
    assert told["digest"] == expected.hexdigest()
    # Two at first, and the one that took the place of that which died.
    assert told["executors"] >= 2
