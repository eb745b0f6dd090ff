"""What callers give, before it is used: the numbers and keys that a request can hold.

Owns which they are, and the words for those that are none.
"""

from __future__ import annotations

from operator import index

from datastreamer.errors import BadBookmark, UsageError
from datastreamer.format import MAX_BOOKMARK_SIZE, U64_MAX


def is_number(number: int, least: int = 0, most: int = U64_MAX) -> bool:
    """Whether it is a whole number from `least` to `most`."""
    try:
        return least <= index(number) <= most
    except TypeError:
        return False


def check_number(what: str, number: int, least: int = 0, most: int = U64_MAX) -> None:
    """Raises `UsageError` unless it is a whole number from `least` to `most`."""
    if not is_number(number, least, most):
        raise UsageError(f"{what} is a whole number from {least} to {most}, not {number!r}")


def check_key(key: bytes) -> None:
    """Raises `BadBookmark` unless it is 1 to 16 bytes."""
    if not isinstance(key, (bytes, bytearray, memoryview)):
        raise BadBookmark(f"a bookmark key is 1 to {MAX_BOOKMARK_SIZE} bytes, not {key!r}")
    if not 1 <= len(key) <= MAX_BOOKMARK_SIZE:
        raise BadBookmark(f"a bookmark key is 1 to {MAX_BOOKMARK_SIZE} bytes, not {len(key)}")
