"""Streams as Arrow data: record batches, readers, and Parquet, JSON and CSV files.

Requires pyarrow (``pip install 'datastreamer[arrow]'``); importing this without it raises
`ExtraMissing`.
"""

from __future__ import annotations

try:
    import pyarrow  # noqa: F401
except ImportError:
    from datastreamer.errors import ExtraMissing

    raise ExtraMissing("Arrow needs a package that is not installed", "arrow") from None

from datastreamer.arrow.export import Exported, export
from datastreamer.arrow.record_batches import OnError, to_record_batch
from datastreamer.arrow.stream_reader import ArrowStream, StreamClient, StreamSource
from datastreamer.arrow.tables import NAMES, schema

__all__ = [
    "NAMES",
    "ArrowStream",
    "Exported",
    "OnError",
    "StreamClient",
    "StreamSource",
    "export",
    "schema",
    "to_record_batch",
]
