"""Streams as Spark DataFrames: ``spark.read.format("datastream")``.

Requires pyspark 4.0 or later, pyarrow (``pip install 'datastreamer[spark]'``) and Java. Importing
this package without pyspark or pyarrow raises `ExtraMissing`.
"""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from datastreamer.errors import ExtraMissing

try:
    import pyarrow  # noqa: F401
    from pyspark.sql.datasource import DataSourceArrowWriter  # noqa: F401
except ImportError:
    raise ExtraMissing("Spark needs packages that are missing or too old", "spark") from None
if find_spec("datastreamer._codec") is None:
    raise ExtraMissing(
        f"{__file__} lacks the package's compiled modules, which no zip file of --py-files can "
        "have, so each machine needs the package",
        "spark",
    )

from datastreamer.spark.java import find_java
from datastreamer.spark.native.jar import native_jar
from datastreamer.spark.pipeline.ingest import Ingest
from datastreamer.spark.pipeline.queries import QUERIES, draw, open_tables
from datastreamer.spark.reassembly.event_rows import events_of, payloads_of
from datastreamer.spark.reassembly.frames import (
    messages,
    read_messages,
    reassemble,
    reassemble_stream,
)
from datastreamer.spark.reassembly.state import STATE_SETTINGS
from datastreamer.spark.session import SETTINGS, register, session
from datastreamer.spark.source import DatastreamSource
from datastreamer.spark.stream.merge import apply_changes
from datastreamer.spark.stream.reader import lag

if TYPE_CHECKING:
    from datastreamer.spark.reassembly.cardinal import cardinal_blocks as cardinal_blocks
    from datastreamer.spark.reassembly.cardinal import cardinal_messages as cardinal_messages

__all__ = [
    "QUERIES",
    "SETTINGS",
    "STATE_SETTINGS",
    "DatastreamSource",
    "Ingest",
    "apply_changes",
    "cardinal_blocks",
    "cardinal_messages",
    "draw",
    "events_of",
    "find_java",
    "lag",
    "messages",
    "native_jar",
    "open_tables",
    "payloads_of",
    "read_messages",
    "reassemble",
    "reassemble_stream",
    "register",
    "session",
]


def __getattr__(name: str) -> Any:
    # Loaded when first used: these need the extra `cardinal`.
    if name not in ("cardinal_blocks", "cardinal_messages"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.reassembly.cardinal"), name)
