"""`spark.read.format("datastream")`: what Spark makes of files and servers."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from datastreamer import arrow


def digest(rows: Any) -> str:
    found = hashlib.sha256()
    for number, kind, data in rows:
        found.update(b"%d %d %d " % (number, kind, len(data)) + bytes(data))
    return found.hexdigest()


def test_the_real_stream_is_what_the_arrow_reader_says(spark: Any, real_stream: Path) -> None:
    frame = spark.read.format("datastream").option("partitionBytes", "2m").load(str(real_stream))
    assert frame.rdd.getNumPartitions() == 3
    rows = sorted(frame.collect())
    table = arrow.reader(real_stream).read_all()
    expected = zip(*(table.column(name).to_pylist() for name in table.column_names), strict=True)
    assert len(rows) == 34723
    assert digest(rows) == digest(expected)
