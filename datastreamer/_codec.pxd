"""The codec's functions for other compiled modules: checks of arguments, errors, and a batch's
columns. The checks that every entry passes are inline; only a failed one calls a function.
"""

from cpython.long cimport PyLong_AsLongLongAndOverflow
from cpython.number cimport PyNumber_Index
from libc.stdint cimport UINT32_MAX, int64_t, uint8_t, uint32_t, uint64_t

from datastreamer._entry cimport TYPE_BOOKMARK, Verdict

cdef struct BatchColumns:
    # Valid as long as the batch lives; they do not change.
    const uint8_t* base
    const int64_t* offsets
    const uint32_t* lengths
    const uint32_t* types
    const uint64_t* numbers  # NULL: consecutive, from `first_number`
    uint64_t first_number
    Py_ssize_t count


cdef void* column(Py_ssize_t count, size_t size) except NULL
cdef int columns_of(object batch, BatchColumns* columns) except -1
cdef uint64_t as_u64(object value, str what) except? 0xFFFFFFFFFFFFFFFF
cdef uint8_t as_packet(object value) except? 0xFF
cdef int64_t as_file_offset(object value) except -1
cdef Py_ssize_t span_end(Py_ssize_t size, Py_ssize_t start, object end) except -1
cdef object corrupt(Verdict why, const uint8_t* base, Py_ssize_t at, Py_ssize_t room,
                    uint64_t due)
cdef int refuse_size(Py_ssize_t size, Py_ssize_t item=*) except -1
cdef int refuse_type(object value) except -1


cdef inline uint32_t as_type(object value) except? 0xFFFFFFFF:
    cdef int overflow = 0
    cdef long long kind
    if not isinstance(value, int):
        value = PyNumber_Index(value)
    kind = PyLong_AsLongLongAndOverflow(value, &overflow)
    if overflow or kind < 0 or kind > <long long>UINT32_MAX:
        refuse_type(value)
    return <uint32_t>kind


cdef inline uint32_t as_event_type(object value) except? 0xFFFFFFFF:
    cdef uint32_t kind = as_type(value)
    if kind == TYPE_BOOKMARK:
        refuse_type(kind)
    return kind
