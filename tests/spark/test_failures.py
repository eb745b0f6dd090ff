"""Errors of the source in Python end with this package's one line, not under a trace."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pyspark.errors import PySparkException

from datastreamer import StreamServer
from datastreamer.errors import ConnectFailed
from datastreamer.spark.failures import reason
from tests.spark.conftest import Make
from tests.spark.read.reading import Query

NOWHERE = {"server": "127.0.0.1:1", "retryFor": "0"}
REFUSED = "cannot connect to 127.0.0.1:{}: Connection refused; is a server running there?"


def assert_one_line(action: Callable[[], Any], line: str) -> None:
    with pytest.raises(PySparkException) as raised:
        action()
    assert reason(raised.value) == line
    shown = str(raised.value)
    assert "Traceback" not in shown
    assert 'File "' not in shown


def test_of_a_plan(spark: Any) -> None:
    found = spark.read.format("datastream").options(**NOWHERE).load()
    assert_one_line(found.collect, REFUSED.format(1))


def test_of_a_task(spark: Any, make: Make, tmp_path: Path) -> None:
    damaged = make([(1, b"a" * 1000)] * 2000)
    with damaged.open("r+b") as file:
        file.seek(5_000)
        file.write(b"\x77" * 2000)
    path = shutil.move(damaged, tmp_path / "alone.bin")
    found = spark.read.format("datastream").option("reader", "python").load(str(path))
    with pytest.raises(Exception, match=r"alone\.bin") as known:
        Query(path=path).rows()
    assert_one_line(found.collect, str(known.value))


def test_of_a_server_that_is_lost(spark: Any, make: Make) -> None:
    with StreamServer(make([(1, b"a")]), host="127.0.0.1", port=0, index="memory") as server:
        port = server.port
        options = {"server": f"127.0.0.1:{port}", "retryFor": "0"}
        found = spark.read.format("datastream").options(**options).load()
        assert found.count() == 1
    assert_one_line(found.collect, REFUSED.format(port))


@pytest.mark.parametrize("changes", ["true", "false"])
def test_of_a_streaming_query(spark: Any, tmp_path: Path, changes: str) -> None:
    found = spark.readStream.format("datastream").options(changes=changes, **NOWHERE).load()
    query = (
        found.writeStream.format("noop")
        .option("checkpointLocation", str(tmp_path))
        .trigger(availableNow=True)
        .start()
    )
    assert_one_line(query.awaitTermination, REFUSED.format(1))


def test_of_a_write(spark: Any) -> None:
    rows = spark.createDataFrame([(2, b"x")], "type LONG, data BINARY")
    write = rows.write.format("datastream").mode("append").options(**NOWHERE)
    assert_one_line(write.save, REFUSED.format(1))


def test_a_process_that_is_no_worker_of_spark_keeps_its_traces() -> None:
    with pytest.raises(ConnectFailed):
        Query(**NOWHERE)
    assert "SPARK_HIDE_TRACEBACK" not in os.environ
