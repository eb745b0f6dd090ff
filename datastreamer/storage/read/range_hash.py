"""Hashes of ranges of entries, by which two copies of a stream are compared.

Owns what is hashed: the packed entries without padding, so that the hash is the same wherever
the entries are in a file.
"""

from __future__ import annotations

from xxhash import xxh3_128

from datastreamer.storage.read.reader import Reader

_PART = 1 << 20


def hash_range(reader: Reader, first: int, end: int, most_bytes: int) -> tuple[int, bytes]:
    """The xxh3 (128 bits) of the entries from `first` up to `end`, or to where about `most_bytes`
    are hashed; at least one. Gives where that ends, and the digest.

    `first` is committed. Raises what the reader does.
    """
    hasher, left, number = xxh3_128(), most_bytes, first
    for batch in reader.batches(first, end, min(_PART, most_bytes)):
        hasher.update(batch.packed())
        number = batch.next_number
        left -= batch.nbytes
        if left <= 0:
            break
    return number, hasher.digest()
