"""Reassembles payloads from messages that arrive repeatedly, from several sources, in any order.

Owns the meaning of messages; the ledger owns their storage and its bounds. Knows keys and values;
must not know streams, sockets or clocks: time and positions are arguments.

Two rules make it safe. A payload is complete when the announced messages are all stored, never by
counting arrivals. And nothing is accepted that would make an incomplete payload seem complete: a
header that contradicts another payload's is rejected.
"""

cimport cython
from cpython.buffer cimport PyBUF_SIMPLE, PyBuffer_Release, PyObject_GetBuffer
from cpython.bytes cimport (
    PyBytes_AS_STRING, PyBytes_CheckExact, PyBytes_FromStringAndSize, PyBytes_GET_SIZE,
)
from libc.stdint cimport UINT64_MAX, uint8_t, uint32_t, uint64_t
from libc.stdlib cimport free, malloc, qsort, realloc
from libc.string cimport memcmp

from datastreamer._codec cimport BatchColumns, columns_of
from datastreamer._entry cimport HEAD_SIZE, get_u32
from datastreamer.reassembly._memory cimport Ledger, LedgerSource, id_of
from datastreamer.reassembly._shares cimport (
    header_weight, message_weight, share_lose, share_sent, share_sent_again,
)
from datastreamer.reassembly._slab cimport NONE, hashed
from datastreamer.reassembly._state cimport (
    ANNOUNCED, FINISHED, HEADER_BYTE, Message, NESTED_BYTE, Node, OPEN, PREFIX_SIZE, PrefixPart,
    RECORD_SIZE, TAG_CHARGE, UNINDEXED, UNKNOWN_COUNT, WAITING, index_messages, index_size, message_add,
    message_find, message_new, message_room, reverse_messages, node_at,
)

from datastreamer.errors import BadArgument
from datastreamer.reassembly.events import Conflict, Malformed, PayloadComplete


cdef inline bytes shown(const uint8_t* key, Py_ssize_t size):
    """The part of a key that an event shows."""
    return PyBytes_FromStringAndSize(<const char*>key, min(size, <Py_ssize_t>1024))


cdef int by_key(const void* one, const void* other) noexcept nogil:
    cdef const Message* a = (<const Message**>one)[0]
    cdef const Message* b = (<const Message**>other)[0]
    cdef int order = memcmp(a.data, b.data, min(a.key_size, b.key_size))
    if order:
        return order
    return -1 if a.key_size < b.key_size else a.key_size > b.key_size


@cython.final
cdef class Reassembler(Ledger):
    """Reassembler(subscribe=None, *, reorg_threshold=1000, budget=1073741824, max_age=600.0, resume=None)\n--\n
    Receives messages of many payloads from many sources, returns complete payloads.

    `subscribe` are prefixes of keys, as bytes of any length; None: everything. Messages outside of
    them are discarded at once, and a payload is complete when the rest has arrived. Headers (0x00)
    are always accepted, nested ones (0xff) only if subscribed to: a subscription to a part of a
    payload with nested headers must include 0xff.

    A delivered payload stays known for at least `reorg_threshold` further ones. `budget` bounds the
    memory (delivered payloads may add 144 bytes each). Above it, the ledger first drops what only
    one of several sources has in flight beyond its share, then reduces delivered payloads to their
    ids, then drops what is in flight, oldest first. `max_age` is in seconds of the caller's `now`;
    without `now`, as for sources that can be read again, or with None, nothing expires. `resume` is
    the checkpoint of an earlier run.

    One caller at a time; `UsageError` otherwise.
    """

    cdef uint32_t* _work           # prefixes whose waiting messages must be counted
    cdef uint32_t _work_count, _work_capacity
    cdef bint _everything, _narrow
    cdef tuple _subscribed

    def __init__(self, subscribe=None, *, reorg_threshold=1000, budget=1 << 30, max_age=600.0,
                 resume=None):
        subscribed = () if subscribe is None else tuple(subscribe)
        for wanted in subscribed:
            if not isinstance(wanted, bytes):
                raise TypeError(f"a subscription must be bytes, not {type(wanted).__name__}")
        Ledger.__init__(self, reorg_threshold, budget, max_age, resume)
        self._subscribed = subscribed
        self._everything = subscribe is None or b"" in subscribed
        self._narrow = not self._everything and any(
            [len(wanted) > PREFIX_SIZE for wanted in subscribed])

    def __dealloc__(self):
        free(self._work)

    def receive(self, key, value, source="", position=None, now=None):
        """Process one message; returns its events, in order, with at most one `PayloadComplete`.

        `position` is the source's number for the message, which rises; `now` is a time in seconds
        that does not go back. The arguments are copied.
        """
        cdef Py_buffer key_view, value_view
        self._enter()
        try:
            at = self._source(source)
            if now is not None:
                self._pass_time(now)
            if PyBytes_CheckExact(key) and PyBytes_CheckExact(value):
                self._process(<const uint8_t*>PyBytes_AS_STRING(key), PyBytes_GET_SIZE(key),
                           <const uint8_t*>PyBytes_AS_STRING(value), PyBytes_GET_SIZE(value),
                           at, 0 if position is None else position, position is not None)
            else:
                PyObject_GetBuffer(key, &key_view, PyBUF_SIMPLE)
                try:
                    PyObject_GetBuffer(value, &value_view, PyBUF_SIMPLE)
                    try:
                        self._process(<const uint8_t*>key_view.buf, key_view.len,
                                   <const uint8_t*>value_view.buf, value_view.len,
                                   at, 0 if position is None else position, position is not None)
                    finally:
                        PyBuffer_Release(&value_view)
                finally:
                    PyBuffer_Release(&key_view)
            return self._take_events()
        finally:
            self._busy = False

    def receive_batch(self, batch, source="", *, type=0x10, now=None):
        """Process the messages of a batch of entries; iterates over the events.

        Only entries of `type` are processed; entry numbers are the positions. An event is returned
        before the next message is processed, so that `checkpoint` and `positions` are exact for it.
        At the end the position is `batch.next_number`, also if entries before it are missing.
        Messages that the iteration has not reached have not been received.
        """
        cdef _Received received = _Received.__new__(_Received)
        columns_of(batch, &received.columns)
        received.batch = batch
        received.into = self
        received.source = source
        received.type = type
        received.now = now
        return received

    cdef int _process(self, const uint8_t* key, Py_ssize_t key_size, const uint8_t* value,
                   Py_ssize_t value_size, LedgerSource source, uint64_t position,
                   bint placed) except -1:
        cdef str wrong
        self._work_count = 0  # left by an error
        self._serial += 1
        source.received += 1
        if placed:
            if position == UINT64_MAX:
                raise BadArgument(f"a position must be at most {UINT64_MAX - 1}")
            self._advance(source, position + 1)
        if key_size < PREFIX_SIZE:
            self._malformed(key, key_size, f"a key of {key_size} bytes, less than {PREFIX_SIZE}",
                            source, position, placed)
        elif key_size > <Py_ssize_t>0x7FFFFFFF or value_size > <Py_ssize_t>0x7FFFFFFF:
            self._malformed(key, key_size, "more than 2 GiB", source, position, placed)
        elif key[0] == HEADER_BYTE:
            wrong = self._wrong_records(value, value_size)
            if key_size != PREFIX_SIZE:
                wrong = f"a header's key must have {PREFIX_SIZE} bytes, not {key_size}"
            if wrong is not None:
                self._malformed(key, key_size, wrong, source, position, placed)
            else:
                self._process_header(key, value, value_size, source, position, placed)
        elif not self._wanted(key):
            source.outside += 1
        else:
            wrong = None
            if key[0] == NESTED_BYTE:
                wrong = self._wrong_records(value, value_size)
            if wrong is not None:
                self._malformed(key, key_size, wrong, source, position, placed)
            else:
                self._process_part(key, key_size, value, value_size, source, position, placed)
        if self._used > self._budget:
            self._enforce_budget()
        return 0

    cdef int _process_header(self, const uint8_t* key, const uint8_t* value, Py_ssize_t size,
                          LedgerSource source, uint64_t position, bint placed) except -1:
        cdef uint32_t payload = self._find(key)
        cdef uint64_t records = hashed(self._secret, value, size)
        cdef Node* node
        if payload != NONE:
            node = node_at(&self._nodes, payload)
            if node.part.payload.header and node.part.payload.header != records:
                self._conflict("value", key, PREFIX_SIZE, key, payload, source, position, placed)
            else:
                source.duplicates += 1
                if node.kind == OPEN:
                    share_sent_again(self._shares, &self._nodes, payload, source.number,
                                     header_weight(size))
            return self._seen_again(payload, source, position, placed)
        if self._contradicts(NONE, key, PREFIX_SIZE, value, size, source, position, placed):
            return 0
        payload = self._new_node(key, OPEN)
        node = node_at(&self._nodes, payload)
        node.part.payload.header = records
        self._add_in_flight(payload)
        share_sent(self._shares, &self._nodes, payload, source.number, header_weight(size))
        if placed:
            self._hold(payload, source, position)
        self._announce(payload, key, PREFIX_SIZE, value, size, source, position, placed)
        return self._count_announced(payload, source, position, placed)

    cdef int _process_part(self, const uint8_t* key, Py_ssize_t key_size, const uint8_t* value,
                        Py_ssize_t value_size, LedgerSource source, uint64_t position,
                        bint placed) except -1:
        cdef uint32_t prefix = self._find(key)
        cdef uint32_t payload
        cdef uint32_t hash_ = <uint32_t>hashed(self._secret, key + PREFIX_SIZE, key_size - PREFIX_SIZE)
        cdef Node* node
        cdef Node* owner = NULL
        cdef Message* message
        if prefix == NONE:
            prefix = self._new_node(key, WAITING)
            self._add_in_flight(prefix)
        node = node_at(&self._nodes, prefix)
        payload = prefix
        if node.kind == ANNOUNCED:
            payload = node.whose.owner
            owner = node_at(&self._nodes, payload)
            if owner.kind == FINISHED:
                return self._process_late(prefix, hash_, key, key_size, value, value_size, source,
                                       position, placed)
        message = message_find(&node.part.prefix, key, key_size, hash_)
        if message != NULL:
            if message.value_size == value_size and memcmp(
                message.data + key_size, value, value_size
            ) == 0:
                source.duplicates += 1
                share_sent_again(self._shares, &self._nodes, payload, source.number,
                                 message_weight(key_size, value_size, key[0] == NESTED_BYTE))
            else:
                self._conflict("value", key, key_size, key, payload, source, position, placed)
            return self._seen_again(payload, source, position, placed)
        if owner != NULL and node.part.prefix.count >= node.part.prefix.expected:
            self._excess(node, key, key_size, source, position, placed)
            return 0
        if owner != NULL and key[0] == NESTED_BYTE and self._contradicts(
            payload, key, key_size, value, value_size, source, position, placed
        ):
            return 0
        message = NULL
        if message_room(&node.part.prefix):
            message = message_new(key, key_size, value, value_size, hash_)
        if message == NULL:
            raise MemoryError
        message_add(&node.part.prefix, message)
        self._charge_message(message)
        share_sent(self._shares, &self._nodes, payload, source.number,
                   message_weight(key_size, value_size, key[0] == NESTED_BYTE))
        if placed:
            self._hold(payload, source, position)
        if owner == NULL:
            return 0
        owner.part.payload.missing -= 1
        if key[0] == NESTED_BYTE:
            self._announce(payload, key, key_size, value, value_size, source, position, placed)
            return self._count_announced(payload, source, position, placed)
        if owner.part.payload.missing == 0:
            self._complete(payload, source, position, placed)
        return 0

    cdef int _process_late(self, uint32_t prefix, uint32_t hash_, const uint8_t* key,
                        Py_ssize_t key_size, const uint8_t* value, Py_ssize_t value_size,
                        LedgerSource source, uint64_t position, bint placed) except -1:
        """Process a message of a delivered payload."""
        cdef Node* node = node_at(&self._nodes, prefix)
        cdef PrefixPart* part = &node.part.prefix
        cdef uint64_t tag
        cdef uint32_t at
        cdef uint64_t found = 0
        self._seen_again(node.whose.owner, source, position, placed)
        if part.index == NULL and part.expected != UNKNOWN_COUNT:
            return self._excess(node, key, key_size, source, position, placed)
        if part.index == NULL:
            source.duplicates += 1
            return 0
        tag = hashed(self._secret, value, value_size) & <uint64_t>0xFFFFFFFF
        if part.mask:
            at = hash_ & part.mask
            while part.index[at]:
                if part.index[at] >> 32 == hash_:
                    found = part.index[at]
                    break
                at = (at + 1) & part.mask
        else:
            for at in range(part.count):
                if part.index[at] >> 32 == hash_:
                    found = part.index[at]
                    break
        if not found:
            self._excess(node, key, key_size, source, position, placed)
        elif found & <uint64_t>0xFFFFFFFF != (tag | 1):
            self._conflict("value", key, key_size, key, node.whose.owner, source, position, placed)
        else:
            source.duplicates += 1
        return 0

    cdef inline int _seen_again(self, uint32_t payload, LedgerSource source, uint64_t position,
                                bint placed) except -1:
        """The message is a duplicate: the source could be read again for it, too."""
        cdef Node* node = node_at(&self._nodes, payload)
        if node.kind == FINISHED:
            node.serial = self._serial
        elif placed:
            self._hold(payload, source, position)
        return 0

    cdef str _wrong_records(self, const uint8_t* value, Py_ssize_t size):
        """Why this is not the value of a header; None if it is."""
        cdef Py_ssize_t at = 0
        if size % RECORD_SIZE:
            return f"{size} bytes are not a whole number of {RECORD_SIZE}-byte records"
        while at < size:
            if value[at] == HEADER_BYTE:
                return f"record {at // RECORD_SIZE} announces a prefix of headers, 0x00"
            at += RECORD_SIZE
        return None

    cdef bint _contradicts(self, uint32_t payload, const uint8_t* key, Py_ssize_t key_size,
                       const uint8_t* value, Py_ssize_t size, LedgerSource source, uint64_t position,
                       bint placed) except -1:
        """Whether a header announces a prefix of another payload; reports the conflict."""
        cdef Py_ssize_t at = 0
        cdef uint32_t prefix
        cdef Node* node
        while at < size:
            if self._wanted(value + at):
                prefix = self._find(value + at)
                if prefix != NONE:
                    node = node_at(&self._nodes, prefix)
                    if node.kind == ANNOUNCED and node.whose.owner != payload:
                        self._conflict("prefix", key, key_size, value + at, node.whose.owner,
                                       source, position, placed)
                        return True
            at += RECORD_SIZE
        return False

    cdef int _announce(self, uint32_t payload, const uint8_t* key, Py_ssize_t key_size,
                       const uint8_t* value, Py_ssize_t size, LedgerSource source, uint64_t position,
                       bint placed) except -1:
        """Process a header's records; prefixes with waiting messages are added to `_work`."""
        cdef Py_ssize_t at = 0
        cdef uint32_t prefix, count
        cdef Node* node
        cdef Node* owner = node_at(&self._nodes, payload)
        while at < size:
            if self._wanted(value + at):
                count = get_u32(value + at + PREFIX_SIZE)
                prefix = self._find(value + at)
                if prefix == NONE:
                    prefix = self._new_node(value + at, ANNOUNCED)
                    node = node_at(&self._nodes, prefix)
                    self._adopt(payload, prefix)
                    node.part.prefix.expected = count
                    owner.part.payload.missing += count
                elif node_at(&self._nodes, prefix).kind == WAITING:
                    self._reserve_work()
                    node = node_at(&self._nodes, prefix)
                    self._join_waiting(payload, prefix)
                    self._adopt(payload, prefix)
                    node.part.prefix.expected = count
                    owner.part.payload.missing += count
                    self._work[self._work_count] = prefix
                    self._work_count += 1
                else:
                    node = node_at(&self._nodes, prefix)
                    if node.part.prefix.expected != count:
                        self._conflict("count", key, key_size, value + at, payload, source,
                                       position, placed)
                    # With the larger count the payload is never delivered too early.
                    if node.part.prefix.expected < count:
                        owner.part.payload.missing += count - node.part.prefix.expected
                        node.part.prefix.expected = count
            at += RECORD_SIZE
        return 0

    cdef int _count_announced(self, uint32_t payload, LedgerSource source, uint64_t position,
                     bint placed) except -1:
        """Count the messages that waited for their announcement; complete the payload if whole."""
        cdef uint32_t prefix
        cdef Node* owner = node_at(&self._nodes, payload)
        while self._work_count:
            self._work_count -= 1
            prefix = self._work[self._work_count]
            self._count_waiting(payload, prefix)
        if owner.part.payload.missing == 0:
            self._complete(payload, source, position, placed)
        return 0

    cdef int _count_waiting(self, uint32_t payload, uint32_t prefix) except -1:
        cdef Node* node = node_at(&self._nodes, prefix)
        cdef Node* owner = node_at(&self._nodes, payload)
        cdef PrefixPart* part = &node.part.prefix
        cdef Message* message
        cdef Message* left
        cdef const uint8_t* value
        cdef bint nested = node.key[0] == NESTED_BYTE
        cdef bint rejected = False
        reverse_messages(part)
        left = part.first
        part.first = NULL
        part.count = 0
        while left != NULL:
            message = left
            left = left.next
            value = message.data + message.key_size
            if part.count >= part.expected:
                self._excess(node, message.data, message.key_size, None, 0, False)
            elif not nested or not self._contradicts(payload, message.data, message.key_size, value,
                                                     message.value_size, None, 0, False):
                message.next = part.first
                part.first = message
                part.count += 1
                owner.part.payload.missing -= 1
                if nested:
                    self._announce(payload, message.data, message.key_size, value,
                                   message.value_size, None, 0, False)
                continue
            rejected = True
            share_lose(self._shares, &self._nodes, payload, message_weight(
                message.key_size, message.value_size, nested))
            self._free_message(message)
        if rejected and part.index != NULL:
            free(part.index)
            part.index = NULL
            part.mask = 0
            if part.count > UNINDEXED and not index_messages(part, index_size(part.count)):
                raise MemoryError
        return 0

    cdef int _reserve_work(self) except -1:
        cdef uint32_t capacity
        cdef void* moved
        if self._work_count == self._work_capacity:
            capacity = self._work_capacity + (self._work_capacity >> 1) + 16
            moved = realloc(self._work, capacity * sizeof(uint32_t))
            if moved == NULL:
                raise MemoryError
            self._work = <uint32_t*>moved
            self._work_capacity = capacity
        return 0

    # The end of a payload

    cdef int _complete(self, uint32_t payload, LedgerSource source, uint64_t position,
                       bint placed) except -1:
        cdef Node* node = node_at(&self._nodes, payload)
        cdef list parts = self._parts(node)
        event = PayloadComplete(id_of(node), parts,
                                self._prefixes(node), node.since, source.name,
                                position if placed else None)
        self._keep_tags(node)
        self._remove_in_flight(payload)
        node.kind = FINISHED
        node.serial = self._serial
        self._completed += 1
        self._add_known(payload)
        self._fresh += 1
        if self._fresh > self._threshold:
            self._forgettable = self._known - self._fresh
            self._fresh = 0
        self._forget()
        self._events.append(event)
        return 0

    cdef list _parts(self, Node* payload):
        """The messages in order of their keys, without headers."""
        cdef uint32_t prefix = payload.part.payload.prefixes
        cdef Node* node
        cdef Message* message
        cdef Message** found
        cdef Py_ssize_t count = 0, at, kept = 0
        cdef bint sorted_ = True
        cdef list parts
        while prefix != NONE:
            node = node_at(&self._nodes, prefix)
            if node.key[0] != NESTED_BYTE:
                count += node.part.prefix.count
            prefix = node.part.prefix.sibling
        if count == 0:
            return []
        found = <Message**>malloc(count * sizeof(Message*))
        if found == NULL:
            raise MemoryError
        try:
            # Both lists have the newest first, and what came last is most often the last.
            at = count
            prefix = payload.part.payload.prefixes
            while prefix != NONE:
                node = node_at(&self._nodes, prefix)
                if node.key[0] != NESTED_BYTE:
                    message = node.part.prefix.first
                    while message != NULL:
                        at -= 1
                        found[at] = message
                        if at + 1 < count and by_key(found + at, found + at + 1) > 0:
                            sorted_ = False
                        message = message.next
                prefix = node.part.prefix.sibling
            if not sorted_:
                qsort(found, count, sizeof(Message*), by_key)
            parts = []
            for at in range(count):
                message = found[at]
                if self._narrow and not self._wanted_key(message):
                    continue
                parts.append((
                    PyBytes_FromStringAndSize(<const char*>message.data, message.key_size),
                    PyBytes_FromStringAndSize(<const char*>message.data + message.key_size,
                                              message.value_size),
                ))
            return parts
        finally:
            free(found)

    cdef void _keep_tags(self, Node* payload) noexcept:
        """Keep 32 bits of the hash of each message's key and 32 of its value's, to check late
        messages; free the rest."""
        cdef uint32_t prefix = payload.part.payload.prefixes
        cdef PrefixPart* part
        cdef Node* node
        cdef Message* message
        cdef uint32_t at
        while prefix != NONE:
            node = node_at(&self._nodes, prefix)
            part = &node.part.prefix
            if part.index != NULL:
                for at in range(part.mask + 1):
                    if part.index[at]:
                        message = <Message*>part.index[at]
                        part.index[at] = self._tag(message)
            elif part.count:
                part.index = <uint64_t*>malloc(part.count * sizeof(uint64_t))
                at = 0
                message = part.first
                while message != NULL and part.index != NULL:
                    part.index[at] = self._tag(message)
                    at += 1
                    message = message.next
                if part.index == NULL:
                    part.expected = UNKNOWN_COUNT
            while part.first != NULL:
                message = part.first
                part.first = message.next
                self._free_message(message)
            self._used += <uint64_t>part.count * TAG_CHARGE
            prefix = part.sibling

    cdef inline uint64_t _tag(self, Message* message) noexcept:
        cdef uint64_t value = hashed(self._secret, message.data + message.key_size, message.value_size)
        # Never 0, which marks a free slot.
        return (<uint64_t>message.hash << 32) | (value & <uint64_t>0xFFFFFFFF) | 1

    # Subscription

    cdef inline bint _wanted(self, const uint8_t* prefix) noexcept:
        """Whether messages with this prefix are subscribed to."""
        return self._everything or self._among(prefix)

    cdef bint _among(self, const uint8_t* prefix) noexcept:
        cdef bytes wanted
        cdef Py_ssize_t size
        for wanted in self._subscribed:
            size = min(PyBytes_GET_SIZE(wanted), <Py_ssize_t>PREFIX_SIZE)
            if memcmp(prefix, PyBytes_AS_STRING(wanted), size) == 0:
                return True
        return False

    cdef bint _wanted_key(self, Message* message) noexcept:
        cdef bytes wanted
        for wanted in self._subscribed:
            if PyBytes_GET_SIZE(wanted) <= <Py_ssize_t>message.key_size and memcmp(
                message.data, PyBytes_AS_STRING(wanted), PyBytes_GET_SIZE(wanted)
            ) == 0:
                return True
        return False

    # Events

    cdef int _malformed(self, const uint8_t* key, Py_ssize_t key_size, str why, LedgerSource source,
                        uint64_t position, bint placed) except -1:
        if source is not None:
            source.malformed += 1
        self._events.append(Malformed(shown(key, key_size), why,
                                      None if source is None else source.name,
                                      position if placed else None))
        return 0

    cdef int _excess(self, Node* prefix, const uint8_t* key, Py_ssize_t key_size, LedgerSource source,
                     uint64_t position, bint placed) except -1:
        return self._malformed(
            key, key_size,
            f"one more than the {prefix.part.prefix.expected} messages announced for the prefix",
            source, position, placed,
        )

    cdef int _conflict(self, str what, const uint8_t* key, Py_ssize_t key_size,
                       const uint8_t* prefix, uint32_t payload, LedgerSource source,
                       uint64_t position, bint placed) except -1:
        cdef Node* node = node_at(&self._nodes, payload)
        if source is not None:
            source.conflicts += 1
        self._events.append(Conflict(
            what, shown(key, key_size), PyBytes_FromStringAndSize(<const char*>prefix, PREFIX_SIZE),
            None if node.kind == WAITING else id_of(node),
            None if source is None else source.name, position if placed else None,
        ))
        return 0


@cython.final
cdef class _Received:
    """Iterates over the events of a batch's messages."""

    cdef BatchColumns columns
    cdef object batch
    cdef Reassembler into
    cdef object source
    cdef object now
    cdef uint32_t type
    cdef Py_ssize_t at
    cdef tuple events
    cdef Py_ssize_t event_at

    def __iter__(self):
        return self

    def __next__(self):
        while True:
            if self.events is not None:
                if self.event_at < len(self.events):
                    event = self.events[self.event_at]
                    self.event_at += 1
                    return event
                self.events = None
            if self.at >= self.columns.count:
                self._finish()
                raise StopIteration
            self._more()

    cdef int _finish(self) except -1:
        """The whole batch has been received, with the entries that are missing in it."""
        cdef Reassembler into = self.into
        cdef uint64_t first = self.batch.first_number, next_ = self.batch.next_number
        if first < next_:
            into._enter()
            try:
                into._advance(into._source(self.source), next_)
            finally:
                into._busy = False
        return 0

    cdef int _more(self) except -1:
        """Process messages up to the first that has an event."""
        cdef BatchColumns* columns = &self.columns
        cdef const uint8_t* p
        cdef Py_ssize_t size, key_size, i
        cdef uint64_t position
        cdef LedgerSource source
        cdef Reassembler into = self.into
        into._enter()
        try:
            source = into._source(self.source)
            if self.now is not None and self.at == 0:
                into._pass_time(self.now)
            while self.at < columns.count and not into._events:
                i = self.at
                self.at += 1
                position = (columns.numbers[i] if columns.numbers != NULL
                            else columns.first_number + <uint64_t>i)
                if columns.types[i] != self.type:
                    # Counts as received: it is not read again.
                    into._advance(source, position + 1)
                    continue
                p = columns.base + columns.offsets[i] + HEAD_SIZE
                size = columns.lengths[i]
                key_size = (<Py_ssize_t>p[0] << 8 | p[1]) if size >= 2 else 0
                if size < 2 or key_size > size - 2:
                    into._serial += 1
                    source.received += 1
                    into._advance(source, position + 1)
                    into._malformed(p + 2, max(<Py_ssize_t>0, size - 2),
                                    f"an entry of {size} bytes does not hold its key",
                                    source, position, True)
                else:
                    into._process(p + 2, key_size, p + 2 + key_size, size - 2 - key_size, source,
                               position, True)
            self.events = into._take_events()
            self.event_at = 0
            return 0
        finally:
            into._busy = False
