"""Where Spark looks for data sources by itself: modules named pyspark_* with a DefaultSource.

So ``spark.read.format("datastream")`` needs no registration wherever this package is installed.
"""

from __future__ import annotations

from datastreamer.spark.source import DatastreamSource as DefaultSource

__all__ = ["DefaultSource"]
