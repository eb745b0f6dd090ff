"""Streams as Spark's DataFrames: ``spark.read.format("datastream")``.

Needs pyspark 4.2 or later and pyarrow (``pip install 'datastreamer[spark]'``), and a Java;
importing this without the packages raises `ExtraMissing`.
"""

from __future__ import annotations

try:
    import pyarrow  # noqa: F401
    from pyspark.sql.datasource import EqualTo  # noqa: F401
except ImportError:
    from datastreamer.errors import ExtraMissing

    raise ExtraMissing("Spark needs packages that are missing or too old", "spark") from None

from datastreamer.spark.java import find_java
from datastreamer.spark.read.frames import frame
from datastreamer.spark.reassembly.frames import messages, reassemble, reassemble_stream
from datastreamer.spark.reassembly.state import STATE_SETTINGS
from datastreamer.spark.session import SETTINGS, register, session
from datastreamer.spark.source import DatastreamSource
from datastreamer.spark.stream.reader import lag

__all__ = [
    "SETTINGS",
    "STATE_SETTINGS",
    "DatastreamSource",
    "find_java",
    "frame",
    "lag",
    "messages",
    "reassemble",
    "reassemble_stream",
    "register",
    "session",
]
