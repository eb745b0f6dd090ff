"""Streams as Arrow: record batches, readers, and what Polars, DuckDB and pandas take.

Needs pyarrow (``pip install 'datastreamer[arrow]'``); importing this without it raises
`ExtraMissing`.
"""

from __future__ import annotations

try:
    import pyarrow  # noqa: F401
except ImportError:
    from datastreamer.errors import ExtraMissing

    raise ExtraMissing("Arrow needs a package that is not installed", "arrow") from None

from datastreamer.arrow.batches import OnError, to_record_batch
from datastreamer.arrow.export import Exported, export
from datastreamer.arrow.reading import ArrowStream, StreamClient, StreamSource, reader
from datastreamer.arrow.tables import NAMES, schema

__all__ = [
    "NAMES",
    "ArrowStream",
    "Exported",
    "OnError",
    "StreamClient",
    "StreamSource",
    "export",
    "reader",
    "schema",
    "to_record_batch",
]
