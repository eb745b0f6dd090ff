"""The state of a `Reassembler` in C: nodes, messages, and the positions of sources.

Owns the layouts, the table of 33-byte keys, a prefix's index of its messages, and a source's heap
of the positions where it must be read again. No Python objects; nothing here raises.

A node is a payload (its key 0x00 and the id), a prefix that a payload has announced, or one that
no header has announced yet. Payloads and unannounced prefixes are *in flight*: in one list, oldest
first, each with the positions that it holds.
"""

from libc.stddef cimport size_t
from libc.stdint cimport uint8_t, uint16_t, uint32_t, uint64_t
from libc.stdlib cimport calloc, free, malloc, realloc
from libc.string cimport memcmp, memcpy, memset

from datastreamer.reassembly._slab cimport (
    NONE, Slab, slab_at, slab_free, slab_give, slab_init, slab_take,
)

cdef enum:
    PREFIX_SIZE = 33
    RECORD_SIZE = 37
    HEADER_BYTE = 0x00
    NESTED_BYTE = 0xFF
    # A prefix with at most this many messages has no index.
    UNINDEXED = 8

    # The count of a finished prefix whose messages are no longer known.
    UNKNOWN_COUNT = 0xFFFFFFFF

    # Charges against the budget: the memory of a thing and its share of tables, rounded up
    # (measured by the tests). The bytes of a message are added.
    NODE_CHARGE = 144
    HOLD_CHARGE = 32
    MESSAGE_CHARGE = 64
    TAG_CHARGE = 24

cdef enum Kind:
    WAITING      # a prefix that no header has announced
    ANNOUNCED    # a prefix of the payload `owner`
    OPEN         # a payload in flight
    FINISHED     # a delivered payload

cdef struct Message:
    Message* next
    uint32_t hash         # of the key's bytes after the prefix
    uint32_t key_size
    uint32_t value_size
    uint8_t data[4]       # the key, the value

cdef struct PrefixPart:
    Message* first        # the newest one first
    uint64_t* index       # of Message*, or of tags of a finished payload
    uint32_t mask         # of the index; 0: tags without an order, or no index
    uint32_t expected
    uint32_t count
    uint32_t sibling      # the next prefix of the payload

cdef struct PayloadPart:
    uint64_t missing      # announced messages that have not arrived
    uint64_t header       # the hash of the header's records; 0: unknown
    uint32_t prefixes     # the first of them

cdef union Part:
    PrefixPart prefix
    PayloadPart payload

cdef union Whose:
    uint32_t owner        # ANNOUNCED: its payload
    uint32_t lead         # in flight: its part in the lead of the source `by`

cdef struct Node:
    uint8_t key[PREFIX_SIZE]
    uint8_t kind
    uint16_t by           # in flight: the source that it is assigned to, or NO_SOURCE
    uint32_t tag          # 32 bits of the key's hash
    Whose whose
    uint32_t previous     # of those in flight, or finished
    uint32_t next
    uint32_t before       # of those in the share of a source
    uint32_t behind
    uint32_t holds        # the first of them
    double since          # when the first message came, by the caller's clock
    uint64_t serial       # the number of that message; if FINISHED, of the last one
    Part part

cdef struct Hold:
    uint64_t position     # the lowest position of what the source has sent of the node
    uint32_t next         # of the same node
    uint32_t at           # its place in the source's heap
    uint32_t source

cdef struct Slot:
    uint32_t tag
    uint32_t node         # NONE: free

cdef struct Table:
    Slot* slots
    uint32_t mask
    uint32_t count

cdef struct Heap:
    uint32_t* holds
    uint32_t count
    uint32_t capacity


cdef inline Node* node_at(Slab* nodes, uint32_t item) noexcept nogil:
    return <Node*>slab_at(nodes, item)


cdef inline Hold* hold_at(Slab* holds, uint32_t item) noexcept nogil:
    return <Hold*>slab_at(holds, item)


# The table of keys

cdef inline uint32_t table_find(Table* table, Slab* nodes, const uint8_t* key,
                                uint32_t tag) noexcept nogil:
    cdef uint32_t at
    if table.slots == NULL:
        return NONE
    at = tag & table.mask
    while table.slots[at].node != NONE:
        if table.slots[at].tag == tag and memcmp(
            node_at(nodes, table.slots[at].node).key, key, PREFIX_SIZE
        ) == 0:
            return table.slots[at].node
        at = (at + 1) & table.mask
    return NONE


cdef inline void table_put(Slot* slots, uint32_t mask, uint32_t tag, uint32_t node) noexcept nogil:
    cdef uint32_t at = tag & mask
    while slots[at].node != NONE:
        at = (at + 1) & mask
    slots[at].tag = tag
    slots[at].node = node


cdef inline bint table_resize(Table* table, uint32_t size) noexcept nogil:
    cdef Slot* slots = <Slot*>malloc(<size_t>size * sizeof(Slot))
    cdef uint32_t i
    if slots == NULL:
        return False
    memset(slots, 0xFF, <size_t>size * sizeof(Slot))
    if table.slots != NULL:
        for i in range(table.mask + 1):
            if table.slots[i].node != NONE:
                table_put(slots, size - 1, table.slots[i].tag, table.slots[i].node)
    free(table.slots)
    table.slots = slots
    table.mask = size - 1
    return True


cdef inline bint table_add(Table* table, uint32_t tag, uint32_t node) noexcept nogil:
    """Add a new key; False without memory."""
    cdef uint32_t size = table.mask + 1
    if table.slots == NULL:
        if not table_resize(table, 64):
            return False
    elif table.count >= size - (size >> 2):
        if size >= <uint32_t>1 << 31 or not table_resize(table, 2 * size):
            return False
    table_put(table.slots, table.mask, tag, node)
    table.count += 1
    return True


cdef inline void table_remove(Table* table, uint32_t tag, uint32_t node) noexcept nogil:
    """Remove a key; those after it move up."""
    cdef uint32_t hole = tag & table.mask
    cdef uint32_t at, home
    while table.slots[hole].node != node:
        hole = (hole + 1) & table.mask
    at = hole
    while True:
        at = (at + 1) & table.mask
        if table.slots[at].node == NONE:
            break
        home = table.slots[at].tag & table.mask
        if ((at - home) & table.mask) >= ((at - hole) & table.mask):
            table.slots[hole] = table.slots[at]
            hole = at
    table.slots[hole].node = NONE
    table.count -= 1
    # Shrink the table; without memory for a smaller one it stays.
    if table.mask >= 1024 and table.count < table.mask >> 3:
        table_resize(table, (table.mask + 1) >> 1)


# A prefix's messages

cdef inline Message* message_new(const uint8_t* key, size_t key_size, const uint8_t* value,
                                 size_t value_size, uint32_t hash) noexcept nogil:
    """A copy of a message; NULL without memory."""
    # The data begins inside the struct, so sizeof would be too large.
    cdef Message* made = <Message*>malloc(max(
        sizeof(Message), sizeof(Message) - 4 + key_size + value_size
    ))
    if made == NULL:
        return NULL
    made.next = NULL
    made.hash = hash
    made.key_size = <uint32_t>key_size
    made.value_size = <uint32_t>value_size
    memcpy(made.data, key, key_size)
    if value_size:
        memcpy(made.data + key_size, value, value_size)
    return made


cdef inline bint message_is(Message* message, const uint8_t* key, size_t key_size,
                            uint32_t hash) noexcept nogil:
    return (message.hash == hash and message.key_size == key_size
            and memcmp(message.data + PREFIX_SIZE, key + PREFIX_SIZE, key_size - PREFIX_SIZE) == 0)


cdef inline Message* message_find(PrefixPart* prefix, const uint8_t* key, size_t key_size,
                                  uint32_t hash) noexcept nogil:
    cdef Message* message
    cdef uint32_t at
    if prefix.index == NULL:
        message = prefix.first
        while message != NULL and not message_is(message, key, key_size, hash):
            message = message.next
        return message
    at = hash & prefix.mask
    while prefix.index[at]:
        message = <Message*>prefix.index[at]
        if message_is(message, key, key_size, hash):
            return message
        at = (at + 1) & prefix.mask
    return NULL


cdef inline bint index_messages(PrefixPart* prefix, uint32_t size) noexcept nogil:
    """Index all messages of the list, with `size` slots, a power of two."""
    cdef uint64_t* index = <uint64_t*>calloc(size, sizeof(uint64_t))
    cdef Message* message = prefix.first
    cdef uint32_t at
    if index == NULL:
        return False
    while message != NULL:
        at = message.hash & (size - 1)
        while index[at]:
            at = (at + 1) & (size - 1)
        index[at] = <uint64_t>message
        message = message.next
    free(prefix.index)
    prefix.index = index
    prefix.mask = size - 1
    return True


cdef inline uint32_t index_size(uint32_t count) noexcept nogil:
    """The number of slots for `count` messages: at most three in four are used."""
    cdef uint32_t size = 16
    while count > size - (size >> 2):
        size *= 2
    return size


cdef inline bint message_room(PrefixPart* prefix) noexcept nogil:
    """Ensure space for one more message; False without memory."""
    if prefix.index == NULL:
        return prefix.count < UNINDEXED or index_messages(prefix, 16)
    if prefix.count < (prefix.mask + 1) - ((prefix.mask + 1) >> 2):
        return True
    return prefix.mask < (<uint32_t>1 << 30) and index_messages(prefix, 2 * (prefix.mask + 1))


cdef inline void message_add(PrefixPart* prefix, Message* message) noexcept nogil:
    """Add a new message, after `message_room`."""
    cdef uint32_t at
    message.next = prefix.first
    prefix.first = message
    prefix.count += 1
    if prefix.index != NULL:
        at = message.hash & prefix.mask
        while prefix.index[at]:
            at = (at + 1) & prefix.mask
        prefix.index[at] = <uint64_t>message


cdef inline void reverse_messages(PrefixPart* prefix) noexcept nogil:
    """Reverse the list: oldest first, or newest first again."""
    cdef Message* left = prefix.first
    cdef Message* done = NULL
    cdef Message* message
    while left != NULL:
        message = left
        left = left.next
        message.next = done
        done = message
    prefix.first = done


# Where each source must be read again

cdef inline void heap_put(Heap* heap, Slab* holds, uint32_t at, uint32_t hold) noexcept nogil:
    heap.holds[at] = hold
    hold_at(holds, hold).at = at


cdef inline void heap_rise(Heap* heap, Slab* holds, uint32_t at) noexcept nogil:
    cdef uint32_t hold = heap.holds[at]
    cdef uint64_t position = hold_at(holds, hold).position
    cdef uint32_t parent
    while at:
        parent = (at - 1) >> 1
        if hold_at(holds, heap.holds[parent]).position <= position:
            break
        heap_put(heap, holds, at, heap.holds[parent])
        at = parent
    heap_put(heap, holds, at, hold)


cdef inline void heap_sink(Heap* heap, Slab* holds, uint32_t at) noexcept nogil:
    cdef uint32_t hold = heap.holds[at]
    cdef uint64_t position = hold_at(holds, hold).position
    cdef uint32_t child
    while 2 * at + 1 < heap.count:
        child = 2 * at + 1
        if child + 1 < heap.count and (
            hold_at(holds, heap.holds[child + 1]).position
            < hold_at(holds, heap.holds[child]).position
        ):
            child += 1
        if hold_at(holds, heap.holds[child]).position >= position:
            break
        heap_put(heap, holds, at, heap.holds[child])
        at = child
    heap_put(heap, holds, at, hold)


cdef inline bint heap_add(Heap* heap, Slab* holds, uint32_t hold) noexcept nogil:
    cdef uint32_t capacity
    cdef void* moved
    if heap.count == heap.capacity:
        capacity = heap.capacity + (heap.capacity >> 1) + 16
        moved = realloc(heap.holds, <size_t>capacity * sizeof(uint32_t))
        if moved == NULL:
            return False
        heap.holds = <uint32_t*>moved
        heap.capacity = capacity
    heap_put(heap, holds, heap.count, hold)
    heap.count += 1
    heap_rise(heap, holds, heap.count - 1)
    return True


cdef inline void heap_remove(Heap* heap, Slab* holds, uint32_t hold) noexcept nogil:
    cdef uint32_t at = hold_at(holds, hold).at
    cdef uint32_t last
    cdef void* moved
    heap.count -= 1
    if at != heap.count:
        last = heap.holds[heap.count]
        heap_put(heap, holds, at, last)
        heap_sink(heap, holds, at)
        heap_rise(heap, holds, hold_at(holds, last).at)
    if heap.capacity >= 1024 and heap.count < heap.capacity >> 3:
        moved = realloc(heap.holds, <size_t>(heap.capacity >> 1) * sizeof(uint32_t))
        if moved != NULL:
            heap.holds = <uint32_t*>moved
            heap.capacity >>= 1
