"""Memory for many small items of one size, each identified by a u32; and a keyed hash.

An empty chunk is freed, so that memory shrinks after a peak. Nothing here raises: without memory,
functions return `NONE` or False.
"""

from libc.stdint cimport uint8_t, uint32_t, uint64_t
from libc.stdlib cimport free, malloc, realloc
from libc.string cimport memcpy

cdef enum:
    CHUNK_BITS = 8
    CHUNK_ITEMS = 1 << CHUNK_BITS

cdef extern from *:
    """
    #define DATASTREAMER_NONE 0xFFFFFFFFu
    """
    const uint32_t NONE "DATASTREAMER_NONE"

cdef struct Chunk:
    uint8_t* memory       # NULL: freed
    uint32_t used
    uint32_t free         # the first free item, or NONE
    uint32_t previous     # chunks with room are a list
    uint32_t next         # of those with room, or of the freed ones

cdef struct Slab:
    uint32_t size         # of an item, a multiple of 8
    uint32_t used         # items in all
    Chunk* chunks
    uint32_t count
    uint32_t capacity
    uint32_t roomy        # the first chunk with room
    uint32_t vacant       # the first freed chunk


cdef inline void slab_init(Slab* slab, uint32_t size) noexcept nogil:
    slab.size = size
    slab.used = 0
    slab.chunks = NULL
    slab.count = slab.capacity = 0
    slab.roomy = slab.vacant = NONE


cdef inline void slab_free(Slab* slab) noexcept nogil:
    cdef uint32_t i
    for i in range(slab.count):
        free(slab.chunks[i].memory)
    free(slab.chunks)
    slab_init(slab, slab.size)


cdef inline uint8_t* slab_at(Slab* slab, uint32_t item) noexcept nogil:
    return (slab.chunks[item >> CHUNK_BITS].memory
            + <size_t>(item & (CHUNK_ITEMS - 1)) * slab.size)


cdef inline bint slab_open_chunk(Slab* slab) noexcept nogil:
    """Ensure a chunk with room; False without memory."""
    cdef uint32_t at, capacity, i
    cdef void* moved
    cdef uint8_t* memory
    cdef Chunk* chunk
    if slab.vacant == NONE and slab.count == slab.capacity:
        if slab.count >= (NONE >> CHUNK_BITS):
            return False
        capacity = slab.capacity + (slab.capacity >> 1) + 8
        moved = realloc(slab.chunks, capacity * sizeof(Chunk))
        if moved == NULL:
            return False
        slab.chunks = <Chunk*>moved
        slab.capacity = capacity
    memory = <uint8_t*>malloc(<size_t>slab.size * CHUNK_ITEMS)
    if memory == NULL:
        return False
    if slab.vacant != NONE:
        at = slab.vacant
        slab.vacant = slab.chunks[at].next
    else:
        at = slab.count
        slab.count += 1
    chunk = slab.chunks + at
    chunk.memory = memory
    chunk.used = 0
    chunk.free = at << CHUNK_BITS
    for i in range(<uint32_t>CHUNK_ITEMS):
        (<uint32_t*>(memory + <size_t>i * slab.size))[0] = (
            chunk.free + i + 1 if i + 1 < CHUNK_ITEMS else NONE
        )
    chunk.previous = NONE
    chunk.next = NONE
    slab.roomy = at
    return True


cdef inline uint32_t slab_take(Slab* slab) noexcept nogil:
    """A new, uninitialized item; NONE without memory."""
    cdef Chunk* chunk
    cdef uint32_t item
    if slab.roomy == NONE and not slab_open_chunk(slab):
        return NONE
    chunk = slab.chunks + slab.roomy
    item = chunk.free
    chunk.free = (<uint32_t*>slab_at(slab, item))[0]
    chunk.used += 1
    slab.used += 1
    if chunk.free == NONE:
        slab.roomy = chunk.next
        if chunk.next != NONE:
            slab.chunks[chunk.next].previous = NONE
    return item


cdef inline void slab_give(Slab* slab, uint32_t item) noexcept nogil:
    """Free an item."""
    cdef uint32_t at = item >> CHUNK_BITS
    cdef Chunk* chunk = slab.chunks + at
    if chunk.free == NONE:
        chunk.previous = NONE
        chunk.next = slab.roomy
        if slab.roomy != NONE:
            slab.chunks[slab.roomy].previous = at
        slab.roomy = at
    (<uint32_t*>slab_at(slab, item))[0] = chunk.free
    chunk.free = item
    chunk.used -= 1
    slab.used -= 1
    # Keep the only chunk with room, so that a single item that comes and goes costs no malloc.
    if chunk.used == 0 and (slab.roomy != at or chunk.next != NONE):
        if chunk.previous != NONE:
            slab.chunks[chunk.previous].next = chunk.next
        else:
            slab.roomy = chunk.next
        if chunk.next != NONE:
            slab.chunks[chunk.next].previous = chunk.previous
        free(chunk.memory)
        chunk.memory = NULL
        chunk.next = slab.vacant
        slab.vacant = at


# SipHash-1-3 with a secret of the process, so that senders cannot construct collisions.

cdef inline uint64_t turned(uint64_t value, int bits) noexcept nogil:
    return (value << bits) | (value >> (64 - bits))


cdef inline void sip_round(uint64_t* v) noexcept nogil:
    v[0] += v[1]
    v[1] = turned(v[1], 13) ^ v[0]
    v[0] = turned(v[0], 32)
    v[2] += v[3]
    v[3] = turned(v[3], 16) ^ v[2]
    v[0] += v[3]
    v[3] = turned(v[3], 21) ^ v[0]
    v[2] += v[1]
    v[1] = turned(v[1], 17) ^ v[2]
    v[2] = turned(v[2], 32)


cdef inline uint64_t hashed(const uint64_t* secret, const uint8_t* p, size_t size) noexcept nogil:
    """The hash of `size` bytes, never 0."""
    cdef uint64_t v[4]
    cdef uint64_t word, last = <uint64_t>size << 56
    cdef size_t left = size
    v[0] = secret[0] ^ <uint64_t>0x736F6D6570736575
    v[1] = secret[1] ^ <uint64_t>0x646F72616E646F6D
    v[2] = secret[0] ^ <uint64_t>0x6C7967656E657261
    v[3] = secret[1] ^ <uint64_t>0x7465646279746573
    while left >= 8:
        memcpy(&word, p, 8)
        v[3] ^= word
        sip_round(v)
        v[0] ^= word
        p += 8
        left -= 8
    word = 0
    if left:
        memcpy(&word, p, left)
    last |= word
    v[3] ^= last
    sip_round(v)
    v[0] ^= last
    v[2] ^= 0xFF
    sip_round(v)
    sip_round(v)
    sip_round(v)
    word = v[0] ^ v[1] ^ v[2] ^ v[3]
    return word if word else 1
