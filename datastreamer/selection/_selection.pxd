"""Which entries are wanted: types, and bytes at a fixed place in the data, compared without objects.

Knows pointers and lengths. `clauses.py` has the normal form.
"""

from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_GET_SIZE
from libc.stdint cimport uint8_t, uint16_t, uint32_t, uint64_t
from libc.stdlib cimport calloc, free
from libc.string cimport memcmp, memcpy, memset

cdef enum:
    MOST = 64
    NO_CLAUSE = 0xFF

cdef struct Prefix:
    uint8_t size
    uint8_t content[255]

# The clauses of one type at one offset. No prefix begins with another one.
cdef struct Group:
    uint16_t offset
    # By the first byte of a prefix: the first of the clauses with it, and the one after the last.
    uint8_t first[256]
    uint8_t stop[256]

# The clauses of one type.
cdef struct Kind:
    uint32_t type
    bint whole
    uint8_t groups
    uint8_t first_group

cdef struct Selection:
    uint64_t mask       # of the types: a bit for each type modulo 64
    int kinds
    int groups
    int prefixes
    Kind kind[MOST]
    Group* group
    Prefix* prefix


cdef inline void free_selection(Selection* s) noexcept nogil:
    free(s.group)
    free(s.prefix)
    s.group = NULL
    s.prefix = NULL


cdef inline int select_clauses(Selection* s, tuple clauses) except -1:
    """Fill `s`, which `free_selection` frees, from clauses in normal form, at most 64: types, and
    tuples of type, offset and prefix, in the order of these."""
    cdef Py_ssize_t partial = sum([not isinstance(clause, int) for clause in clauses])
    cdef uint32_t type
    cdef Kind* kind = NULL
    cdef Group* group = NULL
    cdef Prefix* prefix
    cdef bytes content
    cdef uint8_t lead
    if len(clauses) > MOST:
        raise ValueError("too many clauses")
    memset(s, 0, sizeof(Selection))
    if partial:
        s.group = <Group*>calloc(partial, sizeof(Group))
        s.prefix = <Prefix*>calloc(partial, sizeof(Prefix))
        if s.group == NULL or s.prefix == NULL:
            free_selection(s)
            raise MemoryError
    for clause in clauses:
        type = clause if isinstance(clause, int) else clause[0]
        if kind == NULL or kind.type != type:
            kind = &s.kind[s.kinds]
            kind.type = type
            kind.first_group = <uint8_t>s.groups
            s.kinds += 1
            s.mask |= <uint64_t>1 << (type & 63)
            group = NULL
        if isinstance(clause, int):
            kind.whole = True
            continue
        if group == NULL or group.offset != <uint16_t>clause[1]:
            group = &s.group[s.groups]
            group.offset = clause[1]
            memset(group.first, NO_CLAUSE, sizeof(group.first))
            s.groups += 1
            kind.groups += 1
        content = clause[2]
        prefix = &s.prefix[s.prefixes]
        prefix.size = <uint8_t>PyBytes_GET_SIZE(content)
        memcpy(prefix.content, PyBytes_AS_STRING(content), prefix.size)
        lead = prefix.content[0]
        if group.first[lead] == NO_CLAUSE:
            group.first[lead] = <uint8_t>s.prefixes
        s.prefixes += 1
        group.stop[lead] = <uint8_t>s.prefixes
    return 0


cdef inline int is_wanted(const Selection* s, uint32_t type, const uint8_t* data, Py_ssize_t have,
                          Py_ssize_t size) noexcept nogil:
    """Whether an entry of this type with `size` bytes of data is wanted; -1 if the `have` bytes of
    its data that are at hand do not decide."""
    cdef int i
    if not (s.mask >> (type & 63)) & 1:
        return 0
    for i in range(s.kinds):
        if s.kind[i].type == type:
            return 1 if s.kind[i].whole else begins(s, &s.kind[i], data, have, size)
    return 0


cdef inline int begins(const Selection* s, const Kind* kind, const uint8_t* data, Py_ssize_t have,
                       Py_ssize_t size) noexcept nogil:
    """Whether one of the type's prefixes is in the data."""
    cdef const Group* group
    cdef const Prefix* prefix
    cdef Py_ssize_t at, near
    cdef int i, low, high, middle, order, result = 0
    have = min(have, size)
    for i in range(kind.first_group, kind.first_group + kind.groups):
        group = &s.group[i]
        at = group.offset
        if at >= size:
            continue
        if at >= have:
            result = -1
            continue
        low = group.first[data[at]]
        if low == NO_CLAUSE:
            continue
        high = group.stop[data[at]]
        # The one candidate is the last prefix that is not after the data.
        while low < high:
            middle = (low + high) >> 1
            prefix = &s.prefix[middle]
            near = min(<Py_ssize_t>prefix.size, have - at)
            order = memcmp(prefix.content, data + at, near)
            if order == 0 and near < prefix.size:
                if prefix.size <= size - at:
                    result = -1  # the rest is not at hand
                    break
                order = 1  # the data ends within the prefix
            if order == 0:
                return 1
            if order < 0:
                low = middle + 1
            else:
                high = middle
    return result
