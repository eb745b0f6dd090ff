"""RLP encoding, as far as headers and signed transactions need it."""

from __future__ import annotations


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
