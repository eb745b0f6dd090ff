"""The rows of the reader in Java beside those of the source in Python."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from pyspark.errors import PySparkException

from datastreamer.errors import DatastreamerError
from datastreamer.spark.failures import reason
from datastreamer.spark.read.schemas import number_column
from tests.spark.read.reading import Query


def frame(spark: Any, **options: Any) -> Any:
    """The DataFrame that the reader in Java reads."""
    return spark.read.format("datastream").options(reader="native", **options).load()


def rows_of(found: Any) -> list[dict[str, Any]]:
    """The rows of a DataFrame, as `Query` gives them."""
    rows = [row.asDict() for row in found.collect()]
    for row in rows:
        if isinstance(row.get("data"), bytearray):
            row["data"] = bytes(row["data"])
    return rows


def python_parts(found: Any) -> int:
    """How many parts of a DataFrame Java leaves to Python."""
    planned = found._jdf.queryExecution().executedPlan()
    planned.resetMetrics()
    planned.executeCollect()
    scan = planned.collectLeaves().head()
    return int(scan.metrics().apply("pythonParts").value())


def outcome(query: dict[str, Any]) -> list[dict[str, Any]] | str:
    """What the source in Python makes of a query: its rows or its error."""
    try:
        return Query(**query).rows()
    except DatastreamerError as error:
        return str(error)


def assert_equal(
    spark: Any, paths: Iterable[Path], numbers: range | None = None, **options: Any
) -> None:
    """Both readers give the same rows and the same errors for each of these files.

    With `numbers`, the reader in Java gets a filter on the number of entries.
    """
    readable: list[str] = []
    expected: list[dict[str, Any]] = []
    for path in paths:
        found = outcome({"path": path, "systemId": "true", **options})
        if isinstance(found, str):
            with pytest.raises(PySparkException) as raised:
                frame(spark, path=str(path), systemId="true", **options).collect()
            assert reason(raised.value) == found
        else:
            readable.append(str(path))
            expected += found
    if readable:
        named = json.dumps(readable)
        found = frame(spark, paths=named, systemId="true", **options)
        if numbers is not None:
            column = number_column(options.get("table", "entries"))
            found = found.where(f"{column} >= {numbers.start} AND {column} < {numbers.stop}")
            expected = [row for row in expected if row[column] in numbers]
        rows = rows_of(found)
        # One by one: a difference in a list of a million rows takes minutes to print.
        for one, other in zip(rows, expected, strict=False):
            assert one == other
        assert len(rows) == len(expected)
