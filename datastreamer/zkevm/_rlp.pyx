"""RLP, as far as headers and signed transactions need it.

Encoded data has one form: anything else is refused. The package `rlp` takes a time that is
quadratic in the items of a list, and a stream may hold anything.
"""

from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from libc.stdint cimport uint8_t, uint64_t

from datastreamer.errors import DecodeFailed

# Levels of lists in a transaction: itself, its access list, a pair of that, the keys.
cdef int DEPTH = 4


def rlp_decode(bytes data not None):
    """A string as bytes, a list as a list. Raises `ValueError` for any other data, and for lists
    that are nested deeper than those of a transaction."""
    cdef const uint8_t* begin = <const uint8_t*> PyBytes_AS_STRING(data)
    cdef Py_ssize_t at = 0, size = PyBytes_GET_SIZE(data)
    item = read_item(begin, &at, size, DEPTH)
    if at < size:
        raise ValueError(f"{size - at} bytes follow it")
    return item


cdef object read_item(const uint8_t* data, Py_ssize_t* place, Py_ssize_t stop, int depth):
    """The item at `place`, which then is where it ends."""
    cdef Py_ssize_t at = place[0], digits, size, end
    cdef uint8_t first
    cdef list items
    if at == stop:
        raise ValueError("there is no item")
    first = data[at]
    if first < 0x80:
        place[0] = at + 1
        return PyBytes_FromStringAndSize(<const char*> data + at, 1)
    at += 1
    size = first - (0x80 if first < 0xC0 else 0xC0)
    if size > 55:
        digits, size = size - 55, 0
        end = at + digits
        if end > stop:
            raise ValueError("an item is cut off")
        if not data[at]:
            raise ValueError("a length has a shorter form")
        while at < end:
            # No item is as long as what cannot be counted.
            size = min(size, stop) << 8 | data[at]
            at += 1
        if size < 56:
            raise ValueError("a length has a shorter form")
    if size > stop - at:
        raise ValueError("an item is cut off")
    end = at + size
    if first < 0xC0:
        if size == 1 and data[at] < 0x80:
            raise ValueError("a byte has a shorter form")
        place[0] = end
        return PyBytes_FromStringAndSize(<const char*> data + at, size)
    if not depth:
        raise ValueError("lists are nested too deeply")
    items = []
    while at < end:
        items.append(read_item(data, &at, end, depth - 1))
    place[0] = end
    return items


def rlp_fields(tuple names not None, list items not None, dict kinds not None):
    """The items by their names. `kinds` has the most bytes of a field that is a number, or the
    function that reads it. Raises `DecodeFailed` for what is no such number."""
    cdef dict found = {}
    cdef Py_ssize_t size, at
    cdef const uint8_t* digits
    cdef uint64_t number
    for name, item in zip(names, items):
        kind = kinds[name]
        if not isinstance(kind, int):
            found[name] = kind(item)
            continue
        if not isinstance(item, bytes):
            raise DecodeFailed(None, f"not a transaction: {name} is a list")
        size = PyBytes_GET_SIZE(item)
        digits = <const uint8_t*> PyBytes_AS_STRING(item)
        if size and not digits[0]:
            raise DecodeFailed(
                None, f"not a transaction: the number {name} begins with a zero byte"
            )
        if size > <Py_ssize_t> kind:
            raise DecodeFailed(
                None,
                f"not a transaction: the number {name} has {size} bytes, more than {kind}",
            )
        if size > 8:
            found[name] = int.from_bytes(item, "big")
            continue
        number = 0
        for at in range(size):
            number = number << 8 | digits[at]
        found[name] = number
    return found


def rlp_number(value):
    """Encode a number of at most 55 bytes."""
    if 0 < value < 0x80:
        return bytes([value])
    digits = value.to_bytes((value.bit_length() + 7) // 8, "big")
    return bytes([0x80 + len(digits)]) + digits


def rlp_bytes(bytes value not None):
    """Encode a string."""
    if len(value) == 1 and value[0] < 0x80:
        return value
    return head(0x80, len(value)) + value


def rlp_list(bytes content not None):
    """Encode a list from its concatenated encoded items."""
    return head(0xC0, len(content)) + content


def rlp_size(bytes item not None):
    """The encoded size of a string of less than 56 bytes."""
    return 1 if len(item) == 1 and item[0] < 0x80 else 1 + len(item)


cdef bytes head(int kind, Py_ssize_t size):
    if size < 56:
        return bytes([kind + size])
    digits = size.to_bytes((size.bit_length() + 7) // 8, "big")
    return bytes([kind + 55 + len(digits)]) + digits
