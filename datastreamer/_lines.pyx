"""The entries of a batch as JSON lines."""

from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize
from libc.stdint cimport uint8_t, uint32_t, uint64_t
from libc.string cimport memcpy

from datastreamer._codec cimport BatchColumns, columns_of
from datastreamer._entry cimport HEAD_SIZE

cdef enum:
    # The size of a line without its numbers and data.
    LINE = 11 + 10 + 12 + 13

cdef uint8_t[512] PAIRS
for _at in range(256):
    PAIRS[2 * _at] = b"0123456789abcdef"[_at >> 4]
    PAIRS[2 * _at + 1] = b"0123456789abcdef"[_at & 15]


cdef inline char* put_text(char* to, const char* text, Py_ssize_t size) noexcept nogil:
    memcpy(to, text, size)
    return to + size


cdef inline int digits_of(uint64_t value) noexcept nogil:
    cdef int count = 1
    while value >= 10:
        value //= 10
        count += 1
    return count


cdef inline uint64_t number_of(const BatchColumns* columns, Py_ssize_t i) noexcept nogil:
    if columns.numbers != NULL:
        return columns.numbers[i]
    return columns.first_number + <uint64_t>i


cdef inline char* put_decimal(char* to, uint64_t value) noexcept nogil:
    cdef char[20] digits
    cdef int at = 20
    while True:
        at -= 1
        digits[at] = <char>(48 + value % 10)
        value //= 10
        if not value:
            break
    return put_text(to, digits + at, 20 - at)


cdef void put_lines(
    char* to, const BatchColumns* columns, const char* end, Py_ssize_t end_size
) noexcept nogil:
    cdef Py_ssize_t i
    cdef uint32_t j
    cdef const uint8_t* data
    for i in range(columns.count):
        to = put_decimal(put_text(to, b'{"number": ', 11), number_of(columns, i))
        to = put_decimal(put_text(to, b', "type": ', 10), columns.types[i])
        to = put_decimal(put_text(to, b', "length": ', 12), columns.lengths[i])
        to = put_text(to, b', "data": "0x', 13)
        data = columns.base + columns.offsets[i] + HEAD_SIZE
        for j in range(columns.lengths[i]):
            memcpy(to, &PAIRS[2 * data[j]], 2)
            to += 2
        to = put_text(to, end, end_size)


def json_lines(batch, time=b""):
    """One JSON object per line and entry: number, type, length of data, data in hex; and `time`, if
    it is not empty, for each."""
    cdef BatchColumns columns
    cdef Py_ssize_t i, size
    cdef bytes lines, end = b'", "time": "%b"}\n' % time if time else b'"}\n'
    columns_of(batch, &columns)
    size = columns.count * (LINE + len(end))
    for i in range(columns.count):
        size += digits_of(number_of(&columns, i)) + digits_of(columns.types[i])
        size += digits_of(columns.lengths[i]) + 2 * <Py_ssize_t>columns.lengths[i]
    lines = PyBytes_FromStringAndSize(NULL, size)
    cdef char* to = PyBytes_AS_STRING(lines)
    cdef const char* end_text = end
    cdef Py_ssize_t end_size = len(end)
    # No other thread has the object yet.
    with nogil:
        put_lines(to, &columns, end_text, end_size)
    return lines
