"""Structured Streaming over streams."""
