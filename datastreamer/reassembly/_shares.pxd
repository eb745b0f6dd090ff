"""Whose the things in flight are, so that what is above the budget is taken from who has most.

A thing is a source's that has sent more of it than all others together, by its *lead*: a message
counts for who sends it first, and against that one where another source sends the same again. So
what sources agree about is nobody's, and what one alone sends is its own wherever it puts it.
Knows sizes; no Python object. Nothing here raises.
"""

from libc.stdint cimport UINT32_MAX, uint16_t, uint32_t, uint64_t

from datastreamer.reassembly._slab cimport NONE, Slab
from datastreamer.reassembly._state cimport (
    HOLD_CHARGE, MESSAGE_CHARGE, NODE_CHARGE, Node, RECORD_SIZE, node_at,
)

cdef enum:
    NOBODY = 0xFFFF
    # A lead is in units of 16 bytes: 32 bits of it go as far as 64 GiB.
    UNIT_BITS = 4
    # What a thing costs beside its messages; part of a lead while there is one.
    OPENING = (NODE_CHARGE + HOLD_CHARGE) >> UNIT_BITS

cdef struct Share:
    uint64_t lead         # of all its things
    uint32_t first, last  # of them, in the order in which they became its


cdef inline uint32_t weight_of(uint64_t size, uint64_t records) noexcept nogil:
    """The units of a message of so many bytes that announces so many prefixes."""
    return <uint32_t>((size + records * NODE_CHARGE + (1 << UNIT_BITS) - 1) >> UNIT_BITS)


cdef inline uint32_t header_weight(uint64_t size) noexcept nogil:
    """Of a header with so many bytes of records, which are not kept themselves."""
    return weight_of(0, 1 + size // RECORD_SIZE)


cdef inline uint32_t message_weight(uint64_t key_size, uint64_t value_size,
                                    bint nested) noexcept nogil:
    return weight_of(key_size + value_size + MESSAGE_CHARGE,
                     value_size // RECORD_SIZE if nested else 0)


cdef inline void share_take(Share* shares, Slab* nodes, uint32_t item, uint16_t source,
                            uint32_t weight) noexcept nogil:
    """What was nobody's is a source's."""
    cdef Node* node = node_at(nodes, item)
    cdef Share* share = shares + source
    node.by = source
    node.whose.lead = min(weight, UINT32_MAX - OPENING) + OPENING
    share.lead += node.whose.lead
    node.before = share.last
    node.behind = NONE
    if share.last == NONE:
        share.first = item
    else:
        node_at(nodes, share.last).behind = item
    share.last = item


cdef inline void share_release(Share* shares, Slab* nodes, uint32_t item) noexcept nogil:
    """It is nobody's any more."""
    cdef Node* node = node_at(nodes, item)
    cdef Share* share
    if node.by == NOBODY:
        return
    share = shares + node.by
    share.lead -= node.whose.lead
    if node.before == NONE:
        share.first = node.behind
    else:
        node_at(nodes, node.before).behind = node.behind
    if node.behind == NONE:
        share.last = node.before
    else:
        node_at(nodes, node.behind).before = node.before
    node.by = NOBODY
    node.whose.lead = 0


cdef inline void share_lose(Share* shares, Slab* nodes, uint32_t item,
                            uint32_t weight) noexcept nogil:
    """So much of it is not its source's alone, or is gone."""
    cdef Node* node = node_at(nodes, item)
    if node.by == NOBODY:
        return
    if node.whose.lead - OPENING <= weight:
        share_release(shares, nodes, item)
    else:
        node.whose.lead -= weight
        shares[node.by].lead -= weight


cdef inline void share_sent(Share* shares, Slab* nodes, uint32_t item, uint16_t source,
                            uint32_t weight) noexcept nogil:
    """A source has sent a message of it that nobody had."""
    cdef Node* node = node_at(nodes, item)
    cdef uint32_t over
    if node.by == source:
        weight = min(weight, UINT32_MAX - node.whose.lead)
        node.whose.lead += weight
        shares[source].lead += weight
    elif node.by == NOBODY:
        share_take(shares, nodes, item, source, weight)
    else:
        over = node.whose.lead - OPENING
        share_lose(shares, nodes, item, weight)
        if weight > over:
            share_take(shares, nodes, item, source, weight - over)


cdef inline void share_sent_again(Share* shares, Slab* nodes, uint32_t item, uint16_t source,
                                  uint32_t weight) noexcept nogil:
    """A source has sent a message of it that is there."""
    if node_at(nodes, item).by != source:
        share_lose(shares, nodes, item, weight)


cdef inline void share_replace(Share* shares, Slab* nodes, uint32_t item,
                               uint32_t other) noexcept nogil:
    """What is nobody's takes the place of something else, which is nobody's then."""
    cdef Node* node = node_at(nodes, item)
    cdef Node* old = node_at(nodes, other)
    cdef Share* share = shares + old.by
    node.by = old.by
    node.whose.lead = old.whose.lead
    node.before = old.before
    node.behind = old.behind
    if node.before == NONE:
        share.first = item
    else:
        node_at(nodes, node.before).behind = item
    if node.behind == NONE:
        share.last = item
    else:
        node_at(nodes, node.behind).before = item
    old.by = NOBODY
    old.whose.lead = 0


cdef inline void share_join(Share* shares, Slab* nodes, uint32_t item,
                            uint32_t other) noexcept nogil:
    """Something else becomes a part of it. It stands where the older of the two stood."""
    cdef Node* node = node_at(nodes, item)
    cdef Node* old = node_at(nodes, other)
    cdef uint32_t weight, over
    cdef uint16_t source = old.by
    if source == NOBODY:
        return
    weight = old.whose.lead - OPENING
    if node.by == NOBODY:
        share_replace(shares, nodes, item, other)
    elif node.by != source:
        over = node.whose.lead - OPENING
        share_lose(shares, nodes, item, weight)
        if weight > over:
            share_replace(shares, nodes, item, other)
            share_lose(shares, nodes, item, over)
        else:
            share_release(shares, nodes, other)
    elif old.serial < node.serial:
        over = node.whose.lead - OPENING
        share_release(shares, nodes, item)
        share_replace(shares, nodes, item, other)
        share_sent(shares, nodes, item, source, over)
    else:
        share_release(shares, nodes, other)
        share_sent(shares, nodes, item, source, weight)


cdef inline uint32_t share_largest(Share* shares, uint32_t count) noexcept nogil:
    """Which source has most, the first of several; NONE: none has anything."""
    cdef uint32_t i, found = NONE
    cdef uint64_t most = 0
    for i in range(count):
        if shares[i].lead > most:
            most = shares[i].lead
            found = i
    return found
