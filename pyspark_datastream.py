"""Registers the data source: Spark imports modules named pyspark_* for their DefaultSource.

With this package installed, ``spark.read.format("datastream")`` works without `register`.
"""

from __future__ import annotations

import contextlib

# Without pyarrow, or with an older Spark, other data sources must keep working.
with contextlib.suppress(ImportError):
    from datastreamer.spark.source import DatastreamSource as DefaultSource  # noqa: F401
