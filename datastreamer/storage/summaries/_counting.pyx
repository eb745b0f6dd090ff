"""Counts what the entries of a page are, and the least and greatest numbers in their events.

Knows bytes, and of events what the caller's table says: no names, and no files.
"""

from cpython.buffer cimport PyBUF_SIMPLE, PyBuffer_Release, PyObject_GetBuffer
from libc.stdint cimport UINT64_MAX, uint8_t, uint32_t, uint64_t

from datastreamer._entry cimport HEAD_SIZE, PAGE_SIZE, WHOLE, get_u32, get_u64, judge
from datastreamer.selection._protobuf cimport VARINT, read_tag, read_varint, skip_value

cdef enum:
    MOST_FIELDS = 16
    MOST_TYPES = 16


cdef struct Counting:
    # The fields that are looked at, those of a type side by side: their tags are those of varints.
    uint32_t[MOST_FIELDS] of
    uint32_t[MOST_FIELDS] tags
    uint64_t[MOST_FIELDS] least
    uint64_t[MOST_FIELDS] greatest
    int fields
    # The types that were found; `more`: more than `most`.
    uint32_t[MOST_TYPES] types
    uint32_t[MOST_TYPES] counts
    int found
    int most
    bint more
    bint unreadable
    uint32_t entries


def count(content, Py_ssize_t end, fields, int most_types):
    """Count the entries in the first `end` bytes of a page; `fields` are pairs of an event's type
    and the number of a field, a varint, those of one type side by side.

    Returns the number of entries; whether the payload of an event with such a field cannot be read;
    of each field the least and the greatest value, one after the other (2^64 - 1 and 0: there is no
    such event; a field that is absent is 0); and pairs of type and count by rising type, None if
    there are more than `most_types`. None if the bytes are no whole entries.
    """
    cdef Py_buffer view
    cdef Counting c
    cdef bint whole
    c.fields, c.most, c.found, c.entries = len(fields), most_types, 0, 0
    c.more = c.unreadable = False
    if c.fields > MOST_FIELDS or not 0 <= most_types <= MOST_TYPES:
        raise ValueError("too many fields or types to count")
    for at, (kind, number) in enumerate(fields):
        c.of[at], c.tags[at] = kind, number << 3 | VARINT
        c.least[at], c.greatest[at] = UINT64_MAX, 0
    PyObject_GetBuffer(content, &view, PyBUF_SIMPLE)
    try:
        if not 0 <= end <= view.len:
            raise ValueError("the content ends before the entries")
        with nogil:
            whole = _walk(&c, <const uint8_t*>view.buf, end)
    finally:
        PyBuffer_Release(&view)
    if not whole:
        return None
    ranges = []
    for at in range(c.fields):
        ranges += c.least[at], c.greatest[at]
    types = sorted([(c.types[at], c.counts[at]) for at in range(c.found)])
    return c.entries, c.unreadable, tuple(ranges), None if c.more else tuple(types)


cdef bint _walk(Counting* c, const uint8_t* p, Py_ssize_t end) noexcept nogil:
    cdef const uint8_t* stop = p + end
    cdef Py_ssize_t room = PAGE_SIZE
    cdef uint64_t number
    cdef uint32_t length = 0, kind
    cdef int at = 0
    if end < HEAD_SIZE:
        return end == 0
    number = get_u64(p + 9)
    while p < stop:
        if judge(p, stop - p, room, number, &length) != WHOLE:
            return False
        kind = get_u32(p + 5)
        if at >= c.found or c.types[at] != kind:
            at = _slot(c, kind)
        if at < c.most:
            c.counts[at] += 1
        if not c.unreadable:
            _look(c, kind, p + HEAD_SIZE, p + length)
        c.entries += 1
        number += 1
        p += length
        room -= length
    return True


cdef int _slot(Counting* c, uint32_t kind) noexcept nogil:
    """Where entries of a type are counted; beyond the last place if there is none."""
    cdef int at
    for at in range(c.found):
        if c.types[at] == kind:
            return at
    if c.found == c.most:
        c.more = True
        return c.most
    c.types[c.found], c.counts[c.found] = kind, 0
    c.found += 1
    return c.found - 1


cdef void _look(Counting* c, uint32_t kind, const uint8_t* p, const uint8_t* end) noexcept nogil:
    """Look at the fields of an event."""
    cdef uint64_t[MOST_FIELDS] values
    cdef uint64_t value = 0
    cdef uint32_t tag = 0
    cdef int at, first = 0, stop
    while first < c.fields and c.of[first] != kind:
        first += 1
    stop = first
    while stop < c.fields and c.of[stop] == kind:
        values[stop] = 0
        stop += 1
    if first == stop:
        return
    while p < end:
        p = read_tag(p, end, &tag)
        if p == NULL or tag >> 3 == 0:
            c.unreadable = True
            return
        at = first
        while at < stop and c.tags[at] != tag:
            at += 1
        if at < stop:
            p = read_varint(p, end, &value)
            values[at] = value
        else:
            p = skip_value(p, end, tag, 0)
        if p == NULL:
            c.unreadable = True
            return
    for at in range(first, stop):
        c.least[at] = min(c.least[at], values[at])
        c.greatest[at] = max(c.greatest[at], values[at])
