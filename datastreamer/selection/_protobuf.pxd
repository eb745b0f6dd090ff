"""The wire format of protobuf for C readers: varints, tags, lengths, and skipping.

A function takes (pointer, end) and returns the pointer after what it read, or NULL if that is
incomplete or invalid; it never reads outside. Inlined, never imported at run time.
"""

from libc.stdint cimport uint8_t, uint32_t, uint64_t

cdef enum:
    # Kinds of fields, with the numbers of `schema`.
    U64 = 1
    U32 = 2
    BOOL = 3
    ENUM = 4
    FULL_U64 = 5
    BYTES = 6
    DEBUG = 7
    WEI = 8

cdef enum:
    MAX_FIELDS = 15  # tags of one byte
    MAX_DEPTH = 100  # of nested groups in unknown fields

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
    """Read a varint; NULL if it is cut off or longer than ten bytes.

    Bits of the tenth byte beyond 64 are dropped, as in protobuf's own readers.
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
    """Read a field's tag; NULL if it is invalid."""
    cdef uint64_t value = 0
    cdef const uint8_t* after = read_varint(p, end, &value)
    if after == NULL or after - p > 5 or value > <uint64_t>0xFFFFFFFF:
        return NULL
    tag[0] = <uint32_t>value
    return after


cdef inline const uint8_t* read_size(
    const uint8_t* p, const uint8_t* end, uint64_t* size
) noexcept nogil:
    """Read a length of at most five bytes, without comparing it with what follows."""
    cdef const uint8_t* after = read_varint(p, end, size)
    if after == NULL or after - p > 5 or size[0] > <uint64_t>0x7FFFFFFF:
        return NULL
    return after


cdef inline const uint8_t* skip_value(
    const uint8_t* p, const uint8_t* end, uint32_t tag, int depth
) noexcept nogil:
    """Skip the value of an unknown field; NULL if it is incomplete."""
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
