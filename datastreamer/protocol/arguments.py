"""Checks of callers' arguments: the numbers and keys that a request can hold."""

from __future__ import annotations

from operator import index

from datastreamer.errors import BadBookmark, UsageError
from datastreamer.format import MAX_BOOKMARK_SIZE, U64_MAX


def is_number(number: int, least: int = 0, most: int = U64_MAX) -> bool:
    """Whether it is an integer from `least` to `most`."""
    try:
        return least <= index(number) <= most
    except TypeError:
        return False


def check_number(what: str, number: int, least: int = 0, most: int = U64_MAX) -> None:
    """Raise `UsageError` unless it is an integer from `least` to `most`."""
    if not is_number(number, least, most):
        raise UsageError(f"{what} must be an integer from {least} to {most}, not {number!r}")


def check_key(key: bytes) -> None:
    """Raise `BadBookmark` unless it is 1 to 16 bytes."""
    if not isinstance(key, (bytes, bytearray, memoryview)):
        raise BadBookmark(f"a bookmark key must be 1 to {MAX_BOOKMARK_SIZE} bytes, not {key!r}")
    if not 1 <= len(key) <= MAX_BOOKMARK_SIZE:
        raise BadBookmark(f"a bookmark key must be 1 to {MAX_BOOKMARK_SIZE} bytes, not {len(key)}")
