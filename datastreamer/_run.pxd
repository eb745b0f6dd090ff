"""A run of entries: the scan, and one step of a walk.

Knows memory, no Python objects, so the caller may release the GIL. Nothing here raises: a scan
and a step return what stopped them.
"""

from libc.stdint cimport int64_t, uint8_t, uint32_t, uint64_t
from libc.stdlib cimport realloc

from datastreamer._entry cimport (
    EMPTY_PAGE, HEAD_SIZE, NOTHING, NO_MEMORY, PACKET_ENTRY, PADDING, PAGE_SIZE, Verdict, WHOLE,
    get_u32, get_u64, judge,
)

cdef extern from *:
    """
    /* The same number, hidden from the optimizer, which would otherwise replace the branch that
       assigns it by an assignment without a branch. */
    static inline uint32_t opaque(uint32_t value) { __asm__ volatile("" : "+r"(value)); return value; }
    """
    void prefetch "__builtin_prefetch" (const void* address) noexcept nogil
    uint32_t opaque(uint32_t value) noexcept nogil

cdef enum:
    # Entries ahead whose heads are prefetched, assuming that they have the length of this one.
    AHEAD = 16

cdef struct Run:
    # The state of a scan. Input, as offsets from `base`:
    const uint8_t* base
    Py_ssize_t at
    Py_ssize_t end
    Py_ssize_t room          # bytes left in the page at `at`
    Py_ssize_t last_end      # just past the last whole entry
    bint paged
    # The next entry:
    uint64_t number
    bint number_known
    uint32_t length          # of the entry at `at`; 0 if unknown
    # Output:
    int64_t* offsets
    uint32_t* lengths
    uint32_t* types
    Py_ssize_t count
    Py_ssize_t capacity
    Py_ssize_t nbytes


cdef inline bint resize_columns(Run* run, Py_ssize_t capacity) noexcept nogil:
    """Allocate columns for `capacity` entries; False if there is no memory."""
    cdef void* moved = realloc(run.offsets, capacity * sizeof(int64_t))
    if moved == NULL:
        return False
    run.offsets = <int64_t*>moved
    moved = realloc(run.lengths, capacity * sizeof(uint32_t))
    if moved == NULL:
        return False
    run.lengths = <uint32_t*>moved
    moved = realloc(run.types, capacity * sizeof(uint32_t))
    if moved == NULL:
        return False
    run.types = <uint32_t*>moved
    run.capacity = capacity
    return True


cdef inline bint grow_columns(Run* run, Py_ssize_t begin) noexcept nogil:
    """Grow the columns for the estimated number of entries in the rest of the span."""
    cdef Py_ssize_t left = run.end - run.at
    cdef Py_ssize_t more = 16 if left <= 4096 else 256
    cdef Py_ssize_t least = run.count >> 3
    # The estimate may be wrong, so one step is bounded.
    cdef Py_ssize_t most = 4 * run.count if run.count > 1 << 20 else 4 << 20
    if run.count:
        more = <Py_ssize_t>(1.02 * <double>run.count / <double>(run.at - begin) * <double>left) + 16
    if more < least:
        more = least
    if more > most:
        more = most
    if more > left // HEAD_SIZE + 1:
        more = left // HEAD_SIZE + 1
    return resize_columns(run, run.count + more)


cdef inline void scan_whole(Run* run) noexcept nogil:
    """Scan whole entries, at least one, until there is none or the columns are full.

    Keeps the state in local variables: the compiler must assume that a store to a column changes
    `run`, and would load its fields again.
    """
    cdef const uint8_t* base = run.base
    cdef int64_t* offsets = run.offsets
    cdef uint32_t* lengths = run.lengths
    cdef uint32_t* types = run.types
    cdef Py_ssize_t at = run.at, end = run.end, room = run.room
    cdef Py_ssize_t count = run.count, capacity = run.capacity
    cdef uint64_t number = run.number
    cdef uint32_t length = 0, usual = 0
    cdef const uint8_t* p
    while count < capacity:
        p = base + at
        if judge(p, end - at, room, number, &length) != WHOLE:
            break
        offsets[count] = at
        if AHEAD * <Py_ssize_t>length < end - at:
            prefetch(p + AHEAD * <Py_ssize_t>length)
        lengths[count] = length - HEAD_SIZE
        types[count] = get_u32(p + 5)
        count += 1
        number += 1
        # If entries have equal lengths, the processor begins with the next one before it has read
        # the length of this one.
        if length != usual:
            usual = opaque(length)
        at += usual
        room -= length
        if room == 0:
            room = PAGE_SIZE
    run.nbytes += at - run.at
    run.at = run.last_end = at
    run.room = room
    run.number = number
    run.count = count


cdef inline Verdict scan_run(Run* run) noexcept nogil:
    """Scan the entries of the span; returns what stopped the scan."""
    cdef Py_ssize_t begin = run.at
    cdef Verdict verdict
    cdef const uint8_t* p
    cdef uint32_t length = 0
    while True:
        p = run.base + run.at
        if not run.number_known and run.end - run.at >= HEAD_SIZE and p[0] == PACKET_ENTRY:
            run.number = get_u64(p + 9)
            run.number_known = True
        verdict = judge(p, run.end - run.at, run.room, run.number, &length)
        if verdict == WHOLE:
            if run.count == run.capacity and not grow_columns(run, begin):
                return NO_MEMORY
            scan_whole(run)
        elif verdict == PADDING and run.paged:
            if run.room == PAGE_SIZE:
                return EMPTY_PAGE
            if run.end - run.at <= run.room:
                return NOTHING
            run.at += run.room
            run.room = PAGE_SIZE
        else:
            run.length = length
            return verdict


cdef inline Verdict step_over(const uint8_t* base, Py_ssize_t* at, Py_ssize_t end, Py_ssize_t* room,
                              uint64_t* number, uint32_t* length) noexcept nogil:
    """Check the entry at `at`, and advance to its end if it is whole."""
    cdef Verdict verdict = judge(base + at[0], end - at[0], room[0], number[0], length)
    if verdict == WHOLE:
        at[0] += length[0]
        room[0] -= length[0]
        number[0] += 1
    elif verdict == PADDING and room[0] == PAGE_SIZE:
        return EMPTY_PAGE
    return verdict
