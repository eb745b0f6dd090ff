"""Streams as DataFrames: planning, partitions, rows."""
