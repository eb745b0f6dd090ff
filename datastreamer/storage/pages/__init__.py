"""Checksums of a stream's pages: how they are computed, kept beside the file, and compared."""
