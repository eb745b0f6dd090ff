"""A standalone cluster: a master and two workers, whose machines have no package of ours."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pyspark
import pytest

from datastreamer import DataStream
from datastreamer.spark import native_jar
from tests.spark.read.test_reading import write_chain
from tests.spark.settings import ENVIRONMENT, ROOT

pytestmark = [
    pytest.mark.soak,
    pytest.mark.skipif(native_jar() is None, reason="the reader in Java was not built: make jar"),
]
HOME = Path(pyspark.__file__).parent
JOB = """
import sys
from datastreamer.spark import session
from tests.spark.settings import SETTINGS

spark = session(sys.argv[1], "standalone", SETTINGS | {
    "spark.executor.memory": "512m",
    "spark.cores.max": "2",
    "spark.executor.cores": "1",
    # What runs Python in an executor fails.
    "spark.executorEnv.PYSPARK_PYTHON": "/nowhere/python",
    "spark.pyspark.python": sys.executable,
})
frame = spark.read.format("datastream").option("partitionBytes", "2m").load(sys.argv[2])
rows = frame.selectExpr("sum(number)", "count(data)", "sum(length(data))").collect()
hosts = spark.sparkContext._jsc.sc().getExecutorMemoryStatus().size() - 1
print(hosts, *rows[0])
query = (frame.sparkSession.readStream.format("datastream").load(sys.argv[2]).writeStream
    .format("parquet").option("checkpointLocation", sys.argv[3] + "/state")
    .trigger(availableNow=True).start(sys.argv[3] + "/rows"))
query.awaitTermination()
print(spark.read.parquet(sys.argv[3] + "/rows").count())
spark.stop()
"""


@pytest.fixture
def master(java: None, tmp_path: Path) -> Iterator[str]:
    """The address of a master with two workers."""
    clean = {
        "PATH": "/usr/bin:/bin",
        "SPARK_HOME": str(HOME),
        "SPARK_LOCAL_IP": "127.0.0.1",
        **{name: os.environ[name] for name in ("JAVA_HOME",) if name in os.environ},
    }

    def start(name: str, *words: str) -> Path:
        log = tmp_path / f"{name}.log"
        command = [HOME / "bin" / "spark-class", f"org.apache.spark.deploy.{words[0]}", *words[1:]]
        with log.open("w") as out:
            process = subprocess.Popen(command, env=clean, stdout=out, stderr=out)
        stack.callback(process.wait)
        stack.callback(process.terminate)
        return log

    def found(log: Path, pattern: str) -> str:
        until = time.monotonic() + 120
        while (match := re.search(pattern, log.read_text())) is None:
            assert time.monotonic() < until, log.read_text()[-3000:]
            time.sleep(0.1)
        return match[1]

    with ExitStack() as stack:
        ui = ("--webui-port", "0")
        log = start("master", "master.Master", "--host", "127.0.0.1", "--port", "0", *ui)
        address = found(log, r"Starting Spark master at (spark://\S+)")
        for at in range(2):
            folder = str(tmp_path / f"worker-{at}")
            own = ("--cores", "1", "--memory", "700m", "--work-dir", folder, *ui)
            log = start(f"worker-{at}", "worker.Worker", "--host", "127.0.0.1", *own, address)
            found(log, "Successfully registered with (master)")
        yield address


def test_the_jar_alone_reads_files(master: str, tmp_path: Path) -> None:
    path = tmp_path / "chain.bin"
    write_chain(path, 8)
    with DataStream.open(path, read_only=True) as stream:
        sizes = [len(entry.data) for entry in stream.entries()]
    ran = subprocess.run(
        [sys.executable, "-c", JOB, master, str(path), str(tmp_path / "out")],
        cwd=ROOT,
        env={**os.environ, **ENVIRONMENT, "PYSPARK_PYTHON": sys.executable},
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr[-3000:]
    count = len(sizes)
    summed, followed = (list(map(int, line.split())) for line in ran.stdout.splitlines()[-2:])
    assert summed == [2, sum(range(count)), count, sum(sizes)]
    assert followed == [count]
