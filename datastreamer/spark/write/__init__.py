"""DataFrames written to a stream."""
