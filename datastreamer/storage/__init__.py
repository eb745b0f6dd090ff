"""One stream on one disk: synchronous, no network."""
