"""RLP, as far as headers and signed transactions need it.

Encoded data has one form: anything else is refused. The package `rlp` takes a time that is
quadratic in the items of a list, and a stream may hold anything.
"""

from __future__ import annotations

from typing import Any, Final

_DEPTH: Final = 4
"""Levels of lists in a transaction: itself, its access list, a pair of that, the keys."""


def rlp_decode(data: bytes) -> Any:
    """A string as bytes, a list as a list. Raises `ValueError` for any other data, and for lists
    that are nested deeper than those of a transaction."""
    item, end = _item(data, 0, len(data), _DEPTH)
    if end < len(data):
        raise ValueError(f"{len(data) - end} bytes follow it")
    return item


def _item(data: bytes, at: int, stop: int, depth: int) -> tuple[Any, int]:
    """The item at `at`, and where it ends."""
    if at == stop:
        raise ValueError("there is no item")
    first = data[at]
    if first < 0x80:
        return data[at : at + 1], at + 1
    at += 1
    size = first - (0x80 if first < 0xC0 else 0xC0)
    if size > 55:
        digits = data[at : min(at + size - 55, stop)]
        at += size - 55
        size = int.from_bytes(digits, "big")
        if size < 56 or not digits[0]:
            raise ValueError("a length has a shorter form")
    end = at + size
    if end > stop:
        raise ValueError("an item is cut off")
    if first < 0xC0:
        if size == 1 and data[at] < 0x80:
            raise ValueError("a byte has a shorter form")
        return data[at:end], end
    if not depth:
        raise ValueError("lists are nested too deeply")
    items = []
    while at < end:
        item, at = _item(data, at, end, depth - 1)
        items.append(item)
    return items, end


def rlp_number(value: int) -> bytes:
    """Encode a number of at most 55 bytes."""
    if 0 < value < 0x80:
        return bytes([value])
    digits = value.to_bytes((value.bit_length() + 7) // 8, "big")
    return bytes([0x80 + len(digits)]) + digits


def rlp_bytes(value: bytes) -> bytes:
    """Encode a string."""
    if len(value) == 1 and value[0] < 0x80:
        return value
    return _head(0x80, len(value)) + value


def rlp_list(content: bytes) -> bytes:
    """Encode a list from its concatenated encoded items."""
    return _head(0xC0, len(content)) + content


def rlp_size(item: bytes) -> int:
    """The encoded size of a string of less than 56 bytes."""
    return 1 if len(item) == 1 and item[0] < 0x80 else 1 + len(item)


def _head(kind: int, size: int) -> bytes:
    if size < 56:
        return bytes([kind + size])
    digits = size.to_bytes((size.bit_length() + 7) // 8, "big")
    return bytes([kind + 55 + len(digits)]) + digits
