"""Reassembly of split payloads in Spark."""
