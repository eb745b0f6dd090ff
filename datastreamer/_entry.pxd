"""One entry's bytes: big-endian numbers, and the one check of an entry's head.

Every reader of entries (scan, walk, page tables, point reads) uses `judge`, so there is one
grammar. Knows pointers and lengths, no Python objects and no files.
"""

from libc.stdint cimport int64_t, uint8_t, uint32_t, uint64_t

cdef enum:
    HEAD_SIZE = 17
    HEADER_PAGE_SIZE = 4096
    PAGE_SIZE = 1 << 20
    MAX_DATA_SIZE = PAGE_SIZE - HEAD_SIZE
    PACKET_PADDING = 0
    PACKET_ENTRY = 2
    TYPE_BOOKMARK = 0xB0
    MAX_BOOKMARK_SIZE = 16

cdef enum Verdict:
    WHOLE            # a whole entry
    NOTHING          # no byte
    PART             # the beginning of an entry
    PADDING          # a padding mark
    FOREIGN          # a packet type that no entry has
    SHORT            # a length that does not cover the head
    LONG             # a length above that of the largest entry
    CROSSING         # the entry extends past the end of its page
    OUT_OF_SEQUENCE  # not the expected number
    EMPTY_PAGE       # padding at the start of a page, where an entry must be
    NO_MEMORY


cdef inline Py_ssize_t page_room(int64_t file_offset) noexcept nogil:
    """The bytes from a file offset to the end of its page: 1 to a page's size."""
    return PAGE_SIZE - <Py_ssize_t>((file_offset - HEADER_PAGE_SIZE) % PAGE_SIZE)


cdef inline uint32_t get_u32(const uint8_t* p) noexcept nogil:
    return (<uint32_t>p[0] << 24) | (<uint32_t>p[1] << 16) | (<uint32_t>p[2] << 8) | p[3]


cdef inline uint64_t get_u64(const uint8_t* p) noexcept nogil:
    return ((<uint64_t>p[0] << 56) | (<uint64_t>p[1] << 48)
            | (<uint64_t>p[2] << 40) | (<uint64_t>p[3] << 32)
            | (<uint64_t>p[4] << 24) | (<uint64_t>p[5] << 16)
            | (<uint64_t>p[6] << 8) | <uint64_t>p[7])


cdef inline void put_u32(uint8_t* p, uint32_t value) noexcept nogil:
    p[0] = <uint8_t>(value >> 24)
    p[1] = <uint8_t>(value >> 16)
    p[2] = <uint8_t>(value >> 8)
    p[3] = <uint8_t>value


cdef inline void put_u64(uint8_t* p, uint64_t value) noexcept nogil:
    p[0] = <uint8_t>(value >> 56)
    p[1] = <uint8_t>(value >> 48)
    p[2] = <uint8_t>(value >> 40)
    p[3] = <uint8_t>(value >> 32)
    p[4] = <uint8_t>(value >> 24)
    p[5] = <uint8_t>(value >> 16)
    p[6] = <uint8_t>(value >> 8)
    p[7] = <uint8_t>value


cdef inline void put_head(uint8_t* p, uint8_t packet, uint32_t length, uint32_t kind,
                          uint64_t number) noexcept nogil:
    """Write the 17 bytes of an entry's head; `length` counts them too."""
    p[0] = packet
    put_u32(p + 1, length)
    put_u32(p + 5, kind)
    put_u64(p + 9, number)


cdef inline Verdict judge(const uint8_t* p, Py_ssize_t have, Py_ssize_t room, uint64_t number,
                          uint32_t* length) noexcept nogil:
    """Check the bytes at `p`, of which `have` may be read; entry `number` is expected there.

    The page has `room` bytes left (the maximum of the type if the bytes have no pages). Sets
    `length` with WHOLE (the size of the entry) and PART (the least size that the entry needs).
    """
    cdef uint32_t n
    if have <= 0:
        return NOTHING
    if p[0] != PACKET_ENTRY:
        return PADDING if p[0] == PACKET_PADDING else FOREIGN
    if room < HEAD_SIZE:
        return CROSSING
    if have < HEAD_SIZE:
        length[0] = HEAD_SIZE
        return PART
    n = get_u32(p + 1)
    if n < HEAD_SIZE:
        return SHORT
    if n > PAGE_SIZE:
        return LONG
    if n > room:
        return CROSSING
    # No entry has the largest u64 as its number: a u64 could not hold the total after it.
    if get_u64(p + 9) != number or number == <uint64_t>0xFFFFFFFFFFFFFFFF:
        return OUT_OF_SEQUENCE
    length[0] = n
    return WHOLE if n <= have else PART
