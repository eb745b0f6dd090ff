"""Messages as bytes: the data of an entry, and the value of a header.

::

    entry  = u16(k) k*OCTET *OCTET     ; the key's length, the key, the value
    body   = *record                   ; the value of a header, nested or not
    record = 33*33OCTET u32(count)     ; count messages have keys that begin with these 33 bytes

All numbers are big-endian.
"""

from cpython.buffer cimport PyBUF_SIMPLE, PyBuffer_Release, PyObject_GetBuffer
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from libc.stdint cimport uint8_t, uint32_t
from libc.string cimport memcpy

from datastreamer._entry cimport get_u32, put_u32
from datastreamer.reassembly._state cimport PREFIX_SIZE, RECORD_SIZE

from datastreamer.errors import BadPayload


def pack_message(bytes key not None, value):
    """The data of an entry that holds a message.

    Raises `BadPayload` for a key above 65,535 bytes.
    """
    cdef Py_ssize_t size = PyBytes_GET_SIZE(key)
    cdef Py_buffer view
    cdef bytes packed
    cdef uint8_t* p
    if size > 0xFFFF:
        raise BadPayload(f"a message's key must be at most 65,535 bytes, not {size:,}")
    PyObject_GetBuffer(value, &view, PyBUF_SIMPLE)
    try:
        packed = PyBytes_FromStringAndSize(NULL, 2 + size + view.len)
        p = <uint8_t*>PyBytes_AS_STRING(packed)
        p[0] = <uint8_t>(size >> 8)
        p[1] = <uint8_t>size
        memcpy(p + 2, PyBytes_AS_STRING(key), size)
        if view.len:
            memcpy(p + 2 + size, view.buf, view.len)
        return packed
    finally:
        PyBuffer_Release(&view)


def unpack_message(data):
    """(key, value) of an entry's data, as bytes. Raises `ValueError` if it is no message."""
    cdef Py_buffer view
    cdef const uint8_t* p
    cdef Py_ssize_t size
    PyObject_GetBuffer(data, &view, PyBUF_SIMPLE)
    try:
        p = <const uint8_t*>view.buf
        if view.len < 2:
            raise ValueError(f"{view.len} bytes are no message: the length of the key has 2")
        size = (<Py_ssize_t>p[0] << 8) | p[1]
        if size > view.len - 2:
            raise ValueError(f"a key of {size} bytes in a message of {view.len} bytes")
        return (PyBytes_FromStringAndSize(<const char*>p + 2, size),
                PyBytes_FromStringAndSize(<const char*>p + 2 + size, view.len - 2 - size))
    finally:
        PyBuffer_Release(&view)


def pack_records(records):
    """The value of a header that announces (prefix, count) in this order.

    `BadPayload`: a prefix is not 33 bytes, or a count no u32.
    """
    cdef list given = list(records)
    cdef bytes packed = PyBytes_FromStringAndSize(NULL, RECORD_SIZE * len(given))
    cdef uint8_t* p = <uint8_t*>PyBytes_AS_STRING(packed)
    cdef bytes prefix
    for prefix, count in given:
        if PyBytes_GET_SIZE(prefix) != PREFIX_SIZE:
            raise BadPayload(f"a prefix must have {PREFIX_SIZE} bytes, not {len(prefix)}")
        if not 0 <= count <= 0xFFFFFFFF:
            raise BadPayload(f"a prefix must have 0 to 4,294,967,295 messages, not {count}")
        memcpy(p, PyBytes_AS_STRING(prefix), PREFIX_SIZE)
        put_u32(p + PREFIX_SIZE, <uint32_t>count)
        p += RECORD_SIZE
    return packed


def scan_records(body):
    """[(prefix, count), ...] of a header's value. Raises `ValueError` for a partial record."""
    cdef Py_buffer view
    cdef const uint8_t* p
    cdef Py_ssize_t i
    PyObject_GetBuffer(body, &view, PyBUF_SIMPLE)
    try:
        if view.len % RECORD_SIZE:
            raise ValueError(f"{view.len} bytes are not a whole number of {RECORD_SIZE}-byte "
                             "records")
        p = <const uint8_t*>view.buf
        return [
            (PyBytes_FromStringAndSize(<const char*>p + i * RECORD_SIZE, PREFIX_SIZE),
             get_u32(p + i * RECORD_SIZE + PREFIX_SIZE))
            for i in range(view.len // RECORD_SIZE)
        ]
    finally:
        PyBuffer_Release(&view)
