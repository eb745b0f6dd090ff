"""What a `Reassembler` keeps, in C: nodes, messages, and where each source stands.

Owns the layouts, the table of 33-byte keys, a prefix's index of its messages, and a
source's heap of the positions that it has to be read again from. Knows memory; no Python
object, and nothing of what completes a payload. Nothing here raises.

A node is a payload (its key 0x00 and the id), or a prefix that a payload has announced, or
one that nobody has yet. Payloads and unannounced prefixes are *in flight*: in one list, the
oldest first, each with the positions that it is held at.
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
    # Up to so many messages a prefix is searched without an index.
    UNINDEXED = 8

    # Instead of a finished prefix's count: which messages it had is not known (any more).
    UNTOLD = 0xFFFFFFFF

    # What is charged against the budget: what a thing takes, its share of tables included
    # (measured by the tests), rounded up. A message's own bytes come on top.
    NODE_CHARGE = 144
    HOLD_CHARGE = 32
    MESSAGE_CHARGE = 64
    TAG_CHARGE = 24

cdef enum Kind:
    WAITING      # a prefix that nobody has announced
    ANNOUNCED    # a prefix of the payload `owner`
    OPEN         # a payload in flight
    FINISHED     # a payload that was given out

cdef struct Message:
    Message* next
    uint32_t hash         # of the key's bytes behind the prefix
    uint32_t key_size
    uint32_t value_size
    uint8_t data[4]       # the key, the value

cdef struct PrefixPart:
    Message* first        # the newest one first
    uint64_t* index       # of Message*, or of tags where the payload is finished
    uint32_t mask         # of the index; 0: tags without an order, or no index
    uint32_t expected
    uint32_t count
    uint32_t sibling      # the next prefix of the payload

cdef struct PayloadPart:
    uint64_t missing      # messages that are announced and not there
    uint64_t header       # the hash of the header's records; 0: not known
    uint32_t prefixes     # the first of them

cdef union Part:
    PrefixPart prefix
    PayloadPart payload

cdef union Whose:
    uint32_t owner        # ANNOUNCED: its payload
    uint32_t lead         # in flight: what it counts in the share of the source `by`

cdef struct Node:
    uint8_t key[PREFIX_SIZE]
    uint8_t kind
    uint16_t by           # in flight: the source in whose share it is, or NOBODY
    uint32_t tag          # 32 bits of the key's hash
    Whose whose
    uint32_t previous     # of those in flight, or finished
    uint32_t next
    uint32_t before       # of those in the share of a source
    uint32_t behind
    uint32_t holds        # the first of them
    double since          # when the first message came, by the caller's clock
    uint64_t serial       # which message that was; of a FINISHED one: which was the last
    Part part

cdef struct Hold:
    uint64_t position     # the lowest at which the source has sent something of the node
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
    """Add a key that is not there; False where there is no memory."""
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
    """Take a key out; those behind it move up."""
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
    # What was needed once does not stay. Where there is no memory for less, it does.
    if table.mask >= 1024 and table.count < table.mask >> 3:
        table_resize(table, (table.mask + 1) >> 1)


# A prefix's messages

cdef inline Message* message_new(const uint8_t* key, size_t key_size, const uint8_t* value,
                                 size_t value_size, uint32_t hash) noexcept nogil:
    """A copy of a message; NULL where there is no memory."""
    # The data begins inside the struct: its end is not its size.
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
    """Make the index of all that are in the list, with place for `size`, a power of two."""
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
    """Slots for `count` messages: at most three in four are taken."""
    cdef uint32_t size = 16
    while count > size - (size >> 2):
        size *= 2
    return size


cdef inline bint message_room(PrefixPart* prefix) noexcept nogil:
    """Have place for one more message; False where there is no memory."""
    if prefix.index == NULL:
        return prefix.count < UNINDEXED or index_messages(prefix, 16)
    if prefix.count < (prefix.mask + 1) - ((prefix.mask + 1) >> 2):
        return True
    return prefix.mask < (<uint32_t>1 << 30) and index_messages(prefix, 2 * (prefix.mask + 1))


cdef inline void message_add(PrefixPart* prefix, Message* message) noexcept nogil:
    """Add a message that is not there; `message_room` came before."""
    cdef uint32_t at
    message.next = prefix.first
    prefix.first = message
    prefix.count += 1
    if prefix.index != NULL:
        at = message.hash & prefix.mask
        while prefix.index[at]:
            at = (at + 1) & prefix.mask
        prefix.index[at] = <uint64_t>message


cdef inline void messages_turn(PrefixPart* prefix) noexcept nogil:
    """Turn the list round: the oldest first, or the newest first again."""
    cdef Message* left = prefix.first
    cdef Message* done = NULL
    cdef Message* message
    while left != NULL:
        message = left
        left = left.next
        message.next = done
        done = message
    prefix.first = done


# Which source has to be read again from where

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
