"""The wire format of protobuf, for what reads it in C: varints, tags, lengths, what to skip.

Takes (pointer, end) and gives the pointer past what was read, or NULL where it is not whole or
none such; nothing is read outside. Inlined, never imported at run time.
"""

from libc.stdint cimport uint8_t, uint32_t, uint64_t

cdef enum:
    # Kinds of fields, as `schema` numbers them.
    U64 = 1
    U32 = 2
    BOOL = 3
    ENUM = 4
    BYTES = 5
    DEBUG = 6

cdef enum:
    MAX_FIELDS = 15  # tags of one byte
    MAX_DEPTH = 100  # of groups inside groups, which unknown fields may be

cdef enum:
    VARINT = 0
    FIXED64 = 1
    LENGTH = 2
    GROUP = 3
    GROUP_END = 4
    FIXED32 = 5


cdef inline const uint8_t* read_varint(
    const uint8_t* p, const uint8_t* end, uint64_t* value
) noexcept nogil:
    """Past a varint; NULL where it is cut off or of more than ten bytes.

    What the tenth has past 64 bits is dropped, as protobuf's own readers do.
    """
    cdef uint64_t found = 0
    cdef int shift = 0
    cdef uint8_t byte
    while p < end and shift < 70:
        byte = p[0]
        p += 1
        found |= <uint64_t>(byte & 0x7F) << shift
        if byte < 0x80:
            value[0] = found
            return p
        shift += 7
    return NULL


cdef inline const uint8_t* read_tag(
    const uint8_t* p, const uint8_t* end, uint32_t* tag
) noexcept nogil:
    """Past a field's tag; NULL where it is none."""
    cdef uint64_t value = 0
    cdef const uint8_t* after = read_varint(p, end, &value)
    if after == NULL or after - p > 5 or value > <uint64_t>0xFFFFFFFF:
        return NULL
    tag[0] = <uint32_t>value
    return after


cdef inline const uint8_t* read_size(
    const uint8_t* p, const uint8_t* end, uint64_t* size
) noexcept nogil:
    """Past a length of five bytes at most, which is not held to what follows; or NULL."""
    cdef const uint8_t* after = read_varint(p, end, size)
    if after == NULL or after - p > 5 or size[0] > <uint64_t>0x7FFFFFFF:
        return NULL
    return after


cdef inline const uint8_t* skip_value(
    const uint8_t* p, const uint8_t* end, uint32_t tag, int depth
) noexcept nogil:
    """Past the value of an unknown field; NULL where it is not whole."""
    cdef uint64_t value = 0
    cdef uint32_t inner = 0
    cdef int wire = tag & 7
    if wire == VARINT:
        return read_varint(p, end, &value)
    if wire == FIXED64:
        return p + 8 if end - p >= 8 else NULL
    if wire == FIXED32:
        return p + 4 if end - p >= 4 else NULL
    if wire == LENGTH:
        p = read_size(p, end, &value)
        if p == NULL or value > <uint64_t>(end - p):
            return NULL
        return p + value
    if wire == GROUP and depth < MAX_DEPTH:
        while True:
            p = read_tag(p, end, &inner)
            if p == NULL:
                return NULL
            if inner & 7 == GROUP_END:
                return p if inner >> 3 == tag >> 3 else NULL
            p = skip_value(p, end, inner, depth + 1)
            if p == NULL:
                return NULL
    return NULL
