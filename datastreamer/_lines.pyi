# The contracts are in the docstrings of _lines.pyx.

from datastreamer._codec import EntryBatch

def json_lines(batch: EntryBatch, time: bytes = b"") -> bytes: ...
