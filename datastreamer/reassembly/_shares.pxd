"""Assigns things in flight to sources, so that the budget is enforced on the source with most.

A thing is assigned to the source that has sent more of it than all others together, its *lead*: a
message counts for the source that sends it first, and against it when another source sends it too.
So what sources agree on is assigned to none, and what only one source sends is its own. No Python
objects; nothing here raises.
"""

from libc.stdint cimport UINT32_MAX, uint16_t, uint32_t, uint64_t

from datastreamer.reassembly._slab cimport NONE, Slab
from datastreamer.reassembly._state cimport (
    HOLD_CHARGE, MESSAGE_CHARGE, NODE_CHARGE, Node, RECORD_SIZE, node_at,
)

cdef enum:
    NO_SOURCE = 0xFFFF
    # A lead counts units of 16 bytes, so that 32 bits reach 64 GiB.
    UNIT_BITS = 4
    # The charge of a thing beside its messages, which is part of its lead.
    OPENING = (NODE_CHARGE + HOLD_CHARGE) >> UNIT_BITS

cdef struct Share:
    uint64_t lead         # of all its things
    uint32_t first, last  # of them, in the order of assignment


cdef inline uint32_t weight_of(uint64_t size, uint64_t records) noexcept nogil:
    """The units of a message: its bytes, and the prefixes that it announces."""
    return <uint32_t>((size + records * NODE_CHARGE + (1 << UNIT_BITS) - 1) >> UNIT_BITS)


cdef inline uint32_t header_weight(uint64_t size) noexcept nogil:
    """The units of a header, whose records are not stored themselves."""
    return weight_of(0, 1 + size // RECORD_SIZE)


cdef inline uint32_t message_weight(uint64_t key_size, uint64_t value_size,
                                    bint nested) noexcept nogil:
    return weight_of(key_size + value_size + MESSAGE_CHARGE,
                     value_size // RECORD_SIZE if nested else 0)


cdef inline void share_take(Share* shares, Slab* nodes, uint32_t item, uint16_t source,
                            uint32_t weight) noexcept nogil:
    """Assign a thing without a source to this source."""
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
    """Take a thing away from its source."""
    cdef Node* node = node_at(nodes, item)
    cdef Share* share
    if node.by == NO_SOURCE:
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
    node.by = NO_SOURCE
    node.whose.lead = 0


cdef inline void share_lose(Share* shares, Slab* nodes, uint32_t item,
                            uint32_t weight) noexcept nogil:
    """Reduce the lead: other sources have sent this much too, or it was removed."""
    cdef Node* node = node_at(nodes, item)
    if node.by == NO_SOURCE:
        return
    if node.whose.lead - OPENING <= weight:
        share_release(shares, nodes, item)
    else:
        node.whose.lead -= weight
        shares[node.by].lead -= weight


cdef inline void share_sent(Share* shares, Slab* nodes, uint32_t item, uint16_t source,
                            uint32_t weight) noexcept nogil:
    """A source has sent a new message of a thing."""
    cdef Node* node = node_at(nodes, item)
    cdef uint32_t over
    if node.by == source:
        weight = min(weight, UINT32_MAX - node.whose.lead)
        node.whose.lead += weight
        shares[source].lead += weight
    elif node.by == NO_SOURCE:
        share_take(shares, nodes, item, source, weight)
    else:
        over = node.whose.lead - OPENING
        share_lose(shares, nodes, item, weight)
        if weight > over:
            share_take(shares, nodes, item, source, weight - over)


cdef inline void share_sent_again(Share* shares, Slab* nodes, uint32_t item, uint16_t source,
                                  uint32_t weight) noexcept nogil:
    """A source has sent a duplicate of a message of a thing."""
    if node_at(nodes, item).by != source:
        share_lose(shares, nodes, item, weight)


cdef inline void share_replace(Share* shares, Slab* nodes, uint32_t item,
                               uint32_t other) noexcept nogil:
    """Put a thing without a source in the place of another, which then has none."""
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
    old.by = NO_SOURCE
    old.whose.lead = 0


cdef inline void share_join(Share* shares, Slab* nodes, uint32_t item,
                            uint32_t other) noexcept nogil:
    """Merge a prefix into a payload, in the place of the older of the two."""
    cdef Node* node = node_at(nodes, item)
    cdef Node* old = node_at(nodes, other)
    cdef uint32_t weight, over
    cdef uint16_t source = old.by
    if source == NO_SOURCE:
        return
    weight = old.whose.lead - OPENING
    if node.by == NO_SOURCE:
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
    """The source with the largest lead, the first of several; NONE if none has any."""
    cdef uint32_t i, found = NONE
    cdef uint64_t most = 0
    for i in range(count):
        if shares[i].lead > most:
            most = shares[i].lead
            found = i
    return found
