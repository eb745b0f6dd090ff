"""Where the versions of Spark differ for a source in Python.

Owns the limits of a batch: Spark has them since 4.2, and the reader in Java uses them with each.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING, Final

import pyspark

VERSION: Final = tuple(map(int, pyspark.__version__.split(".")[:2]))

# Whether Spark passes the start and the limit of a batch to a source in Python.
HAS_LIMITS: Final = find_spec("pyspark.sql.streaming.datasource") is not None

if TYPE_CHECKING or VERSION >= (4, 1):
    from pyspark.sql.datasource import DataSourceStreamArrowWriter
else:
    from pyspark.sql.datasource import DataSourceStreamWriter as DataSourceStreamArrowWriter

if TYPE_CHECKING or HAS_LIMITS:
    from pyspark.sql.streaming.datasource import (
        ReadAllAvailable,
        ReadLimit,
        ReadMaxBytes,
        ReadMaxRows,
        SupportsTriggerAvailableNow,
    )
else:

    class ReadLimit:
        """How much a batch may have."""

    class ReadAllAvailable(ReadLimit):
        """Everything that there is."""

    @dataclass
    class ReadMaxRows(ReadLimit):
        """At most these rows."""

        max_rows: int

    @dataclass
    class ReadMaxBytes(ReadLimit):
        """At most these bytes."""

        max_bytes: int

    class SupportsTriggerAvailableNow:
        """A source that is notified when a query reads what is there, and ends."""


__all__ = [
    "HAS_LIMITS",
    "VERSION",
    "DataSourceStreamArrowWriter",
    "ReadAllAvailable",
    "ReadLimit",
    "ReadMaxBytes",
    "ReadMaxRows",
    "SupportsTriggerAvailableNow",
]
