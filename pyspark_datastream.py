"""Where Spark looks for data sources by itself: modules named pyspark_* with a DefaultSource.

So ``spark.read.format("datastream")`` needs no registration wherever this package is installed.
"""

from __future__ import annotations

import contextlib

# Where pyarrow is missing, or Spark too old, its other formats go on working.
with contextlib.suppress(ImportError):
    from datastreamer.spark.source import DatastreamSource as DefaultSource  # noqa: F401
