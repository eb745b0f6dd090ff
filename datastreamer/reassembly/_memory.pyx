"""The state of a reassembler: things in flight, delivered payloads, and the sources' positions.

Owns the memory and its bounds - budget, age, what is forgotten when - and the positions where a
later run continues. `_state.pxd` has the layouts. `_reassembler.pyx` owns the meaning of messages
and decides when a payload is complete.
"""

cimport cython
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize
from libc.stdint cimport UINT32_MAX, UINT64_MAX, uint8_t, uint32_t, uint64_t
from libc.stdlib cimport free, realloc
from libc.string cimport memcpy, memset

from datastreamer.reassembly._shares cimport (
    NO_SOURCE, Share, UNIT_BITS, share_join, share_largest, share_release,
)
from datastreamer.reassembly._slab cimport (
    NONE, Slab, hashed, slab_free, slab_give, slab_init, slab_take,
)
from datastreamer.reassembly._state cimport (
    ANNOUNCED, FINISHED, HOLD_CHARGE, Heap, Hold, MESSAGE_CHARGE, Message, NODE_CHARGE, Node, OPEN,
    PREFIX_SIZE, PrefixPart, TAG_CHARGE, Table, UNKNOWN_COUNT, WAITING, heap_add, heap_remove, heap_rise,
    hold_at, node_at, table_add, table_find, table_remove,
)

from datastreamer.errors import BadArgument, UsageError
from datastreamer.reassembly.checkpoint import Checkpoint, SourceCounts, Stats
from datastreamer.reassembly.events import Dropped

# Charges against the budget, for tests and tools.
CHARGES = {"node": NODE_CHARGE, "hold": HOLD_CHARGE, "message": MESSAGE_CHARGE, "tag": TAG_CHARGE}

cdef tuple NOTHING = ()


cdef bytes id_of(Node* payload):
    return PyBytes_FromStringAndSize(<const char*>payload.key + 1, PREFIX_SIZE - 1)


cdef bytes key_of(Node* prefix):
    return PyBytes_FromStringAndSize(<const char*>prefix.key, PREFIX_SIZE)


@cython.final
cdef class LedgerSource:
    """The state of one source."""

    def __dealloc__(self):
        free(self.heap.holds)


cdef class Ledger:
    """The state of a `Reassembler`.

    One caller at a time: a method calls `_enter` first and resets `_busy` at the end.
    """

    def __cinit__(self, *args, **kwargs):
        slab_init(&self._nodes, sizeof(Node))
        slab_init(&self._holds, sizeof(Hold))
        # Secret of the process: hash() of a str is randomized.
        self._secret[0] = <uint64_t>(<Py_ssize_t>hash("a reassembler's keys"))
        self._secret[1] = <uint64_t>(<Py_ssize_t>hash("a second secret"))
        self._oldest = self._newest = NONE
        self._first_known = self._last_known = self._next_to_strip = NONE
        self._events = []
        self._sources = []
        self._by_name = {}

    def __init__(self, reorg_threshold, budget, max_age, resume):
        if self._sources or self._known:
            raise UsageError("a Reassembler must be initialized once")
        if reorg_threshold < 0:
            raise BadArgument(f"reorg_threshold must be at least 0, not {reorg_threshold}")
        if budget <= 0:
            raise BadArgument(f"budget must be at least 1 byte, not {budget}")
        if max_age is not None and not max_age > 0:
            raise BadArgument(f"max_age must be more than 0 seconds, or None, not {max_age}")
        self._threshold = min(reorg_threshold, UINT32_MAX)
        self._budget = min(budget, UINT64_MAX >> 1)
        self._ages = max_age is not None
        self._max_age = max_age if self._ages else 0.0
        if resume is not None:
            self._resume(resume)

    def __dealloc__(self):
        cdef uint32_t i, j
        cdef Node* node
        # Every node is in the table.
        if self._table.slots != NULL:
            for i in range(self._table.mask + 1):
                j = self._table.slots[i].node
                if j != NONE:
                    node = node_at(&self._nodes, j)
                    if node.kind == WAITING or node.kind == ANNOUNCED:
                        self._free_messages(node)
        free(self._table.slots)
        slab_free(&self._nodes)
        slab_free(&self._holds)
        free(self._shares)

    def expire(self, now):
        """Drop what is too old at this time; returns a `Dropped` for each."""
        self._enter()
        try:
            self._pass_time(now)
            return self._take_events()
        finally:
            self._busy = False

    def positions(self):
        """Where each source that has a position must be read again to receive everything
        incomplete, including what another source has sent too: any source may be lost."""
        cdef LedgerSource found
        return {found.name: self._position(found) for found in self._sources if found.placed}

    def known(self):
        """[(id, prefixes), ...] of the delivered payloads that are not forgotten, in order of
        delivery: the last `known_count` of all delivered ones."""
        cdef uint32_t at = self._first_known
        found = []
        while at != NONE:
            node = node_at(&self._nodes, at)
            found.append((id_of(node), self._prefixes(node)))
            at = node.next
        return found

    @property
    def known_count(self):
        """The number of delivered payloads that are not forgotten."""
        return self._known

    @property
    def replaying(self):
        """Whether a source has not reached its position of the previous run. Until then no
        delivered payload is forgotten, except to keep the budget."""
        return self._replaying > 0

    def checkpoint(self, *, known=True):
        """The state for a later run, valid once all events so far have been processed.

        `known=False` omits the delivered payloads, for a caller that saves them one by one.
        """
        cdef LedgerSource found
        return Checkpoint(
            self.positions(),
            {found.name: max(found.next, found.seen_before)
             for found in self._sources if found.placed},
            self.known() if known else [],
        )

    def stats(self):
        """Counts so far, and what is in flight now."""
        cdef LedgerSource found
        return Stats(
            in_flight=self._in_flight,
            messages=self._messages,
            message_bytes=self._message_bytes,
            used=self._used,
            known=self._known,
            completed=self._completed,
            dropped=self._dropped,
            oldest=None if self._oldest == NONE else node_at(&self._nodes, self._oldest).since,
            sources={
                found.name: SourceCounts(found.received, found.duplicates, found.conflicts,
                                         found.malformed, found.outside)
                for found in self._sources
            },
        )

    cdef int _enter(self) except -1:
        if self._busy:
            raise UsageError("the Reassembler is in use by another caller: use a lock")
        self._busy = True
        return 0

    cdef tuple _take_events(self):
        if not self._events:
            return NOTHING
        events = tuple(self._events)
        self._events.clear()
        return events

    cdef LedgerSource _source(self, name):
        cdef LedgerSource found
        if name is self._last_name and self._last_source is not None:
            return self._last_source
        found = self._by_name.get(name)
        if found is None:
            if not isinstance(name, str):
                raise TypeError(f"the name of a source must be a str, not {type(name).__name__}")
            if len(self._sources) >= 0xFFFF:
                raise UsageError("more than 65,535 sources")
            found = LedgerSource.__new__(LedgerSource)
            found.name = str(name)
            found.number = <uint16_t>len(self._sources)
            self._open_share(found.number)
            self._by_name[found.name] = found
            self._sources.append(found)
        self._last_source = found
        self._last_name = name
        return found

    cdef int _open_share(self, uint32_t number) except -1:
        cdef uint32_t capacity
        cdef void* moved
        if number == self._shares_capacity:
            capacity = number + (number >> 1) + 4
            moved = realloc(self._shares, capacity * sizeof(Share))
            if moved == NULL:
                raise MemoryError
            self._shares = <Share*>moved
            self._shares_capacity = capacity
        self._shares[number].lead = 0
        self._shares[number].first = self._shares[number].last = NONE
        return 0

    cdef int _resume(self, resume) except -1:
        cdef LedgerSource source
        cdef uint32_t payload, prefix
        cdef bytes key
        for name, position in resume.positions.items():
            source = self._source(name)
            source.placed = True
            source.next = position
            source.seen_before = resume.seen.get(name, position)
            self._replaying += source.seen_before > source.next
        for key, prefixes in resume.known:
            if len(key) != PREFIX_SIZE - 1:
                raise BadArgument(f"a payload's id must have {PREFIX_SIZE - 1} bytes, not {len(key)}")
            key = b"\0" + key
            payload = self._find(<const uint8_t*>PyBytes_AS_STRING(key))
            if payload != NONE:
                continue
            payload = self._new_node(<const uint8_t*>PyBytes_AS_STRING(key), FINISHED)
            for key in prefixes:
                if len(key) != PREFIX_SIZE:
                    raise BadArgument(f"a prefix must have {PREFIX_SIZE} bytes, not {len(key)}")
                if self._find(<const uint8_t*>PyBytes_AS_STRING(key)) == NONE:
                    prefix = self._new_node(<const uint8_t*>PyBytes_AS_STRING(key), ANNOUNCED)
                    self._adopt(payload, prefix)
                    node_at(&self._nodes, prefix).part.prefix.expected = UNKNOWN_COUNT
            self._add_known(payload)
        self._enforce_budget()
        return 0

    cdef void _add_known(self, uint32_t payload) noexcept:
        """Append a payload to the delivered ones."""
        cdef Node* node = node_at(&self._nodes, payload)
        cdef Node* before
        node.previous = self._last_known
        node.next = NONE
        if self._last_known == NONE:
            self._first_known = payload
        else:
            before = node_at(&self._nodes, self._last_known)
            before.next = payload
        self._last_known = payload
        if self._next_to_strip == NONE:
            self._next_to_strip = payload
        self._known += 1

    cdef void _forget(self) noexcept:
        """Forget delivered payloads beyond the threshold, oldest first.

        Not those of which a message arrived after the oldest thing in flight: a later run reads
        from there, and would deliver them again. None while a source replays entries of the
        previous run.
        """
        cdef Node* node
        cdef uint32_t payload
        cdef uint64_t oldest = UINT64_MAX
        if self._replaying:
            return
        if self._oldest != NONE:
            oldest = node_at(&self._nodes, self._oldest).serial
        while self._forgettable:
            payload = self._first_known
            node = node_at(&self._nodes, payload)
            if node.serial >= oldest:
                return
            self._strip_prefixes(node)
            self._first_known = node.next
            if self._first_known == NONE:
                self._last_known = NONE
            else:
                node_at(&self._nodes, self._first_known).previous = NONE
            if self._next_to_strip == payload:
                self._next_to_strip = self._first_known
            self._remove_node(payload)
            self._known -= 1
            self._forgettable -= 1

    cdef void _strip_prefixes(self, Node* payload) noexcept:
        """Forget the prefixes of a delivered payload."""
        cdef uint32_t prefix = payload.part.payload.prefixes
        cdef uint32_t next_
        cdef Node* node
        while prefix != NONE:
            node = node_at(&self._nodes, prefix)
            next_ = node.part.prefix.sibling
            free(node.part.prefix.index)
            self._used -= <uint64_t>node.part.prefix.count * TAG_CHARGE
            self._remove_node(prefix)
            prefix = next_
        payload.part.payload.prefixes = NONE

    cdef int _enforce_budget(self) except -1:
        cdef Node* node
        cdef uint32_t above
        while self._used > self._budget + min(self._known, 2 * self._threshold + 2) * NODE_CHARGE:
            above = self._above_share()
            if above != NONE:
                self._drop(above, "budget")
                self._forget()
            elif self._next_to_strip != NONE:
                node = node_at(&self._nodes, self._next_to_strip)
                self._strip_prefixes(node)
                self._next_to_strip = node.next
            elif self._oldest != NONE:
                self._drop(self._oldest, "budget")
                self._forget()
            elif self._replaying and self._forgettable:
                # A source that never returns must not consume unlimited memory.
                self._replaying = 0
                self._forget()
            else:
                break
        return 0

    cdef uint32_t _above_share(self) noexcept:
        """The oldest thing of the source that exceeds its share most, unless it is the only source;
        NONE if no source does. A share is the budget divided by the number of sources plus one."""
        cdef uint32_t count = <uint32_t>len(self._sources)
        cdef uint32_t largest = share_largest(self._shares, count)
        if count < 2 or largest == NONE:
            return NONE
        if self._shares[largest].lead << UNIT_BITS <= self._budget // (count + 1):
            return NONE
        return self._shares[largest].first

    cdef int _pass_time(self, now) except -1:
        cdef double time = now
        if time > self._now:
            self._now = time
        if not self._ages:
            return 0
        while self._oldest != NONE and (
            self._now - node_at(&self._nodes, self._oldest).since > self._max_age
        ):
            self._drop(self._oldest, "age")
        return 0

    cdef int _drop(self, uint32_t at, str why) except -1:
        """Drop something in flight."""
        cdef Node* node = node_at(&self._nodes, at)
        cdef Node* prefix
        cdef uint32_t item, next_
        cdef uint32_t hold = node.holds
        cdef bint waiting = node.kind == WAITING
        cdef uint64_t messages_before = self._messages
        cdef uint64_t bytes_before = self._message_bytes
        cdef object missing = None if waiting else node.part.payload.missing
        cdef LedgerSource source
        positions = {}
        while hold != NONE:
            source = self._sources[hold_at(&self._holds, hold).source]
            positions[source.name] = hold_at(&self._holds, hold).position
            hold = hold_at(&self._holds, hold).next
        named = key_of(node) if waiting else id_of(node)
        since = node.since
        self._remove_in_flight(at)
        if waiting:
            self._free_messages(node)
        else:
            item = node.part.payload.prefixes
            while item != NONE:
                prefix = node_at(&self._nodes, item)
                next_ = prefix.part.prefix.sibling
                self._free_messages(prefix)
                self._remove_node(item)
                item = next_
        self._remove_node(at)
        self._dropped += 1
        self._events.append(Dropped(
            why, None if waiting else named, named if waiting else None,
            messages_before - self._messages, bytes_before - self._message_bytes, missing, since,
            positions,
        ))
        return 0

    cdef uint32_t _find(self, const uint8_t* key) noexcept:
        return table_find(&self._table, &self._nodes, key,
                          <uint32_t>hashed(self._secret, key, PREFIX_SIZE))

    cdef uint32_t _new_node(self, const uint8_t* key, uint8_t kind) except? 0xFFFFFFFF:
        cdef uint32_t item = slab_take(&self._nodes)
        cdef Node* node
        if item == NONE:
            raise MemoryError
        node = node_at(&self._nodes, item)
        memset(node, 0, sizeof(Node))
        memcpy(node.key, key, PREFIX_SIZE)
        node.kind = kind
        node.tag = <uint32_t>hashed(self._secret, key, PREFIX_SIZE)
        node.by = NO_SOURCE
        node.previous = node.next = node.holds = NONE
        node.since = self._now
        node.serial = self._serial
        if kind == OPEN or kind == FINISHED:
            node.part.payload.prefixes = NONE
        else:
            node.part.prefix.sibling = NONE
        if not table_add(&self._table, node.tag, item):
            slab_give(&self._nodes, item)
            raise MemoryError
        self._used += NODE_CHARGE
        return item

    cdef void _remove_node(self, uint32_t item) noexcept:
        table_remove(&self._table, node_at(&self._nodes, item).tag, item)
        slab_give(&self._nodes, item)
        self._used -= NODE_CHARGE

    cdef void _add_in_flight(self, uint32_t item) noexcept:
        cdef Node* node = node_at(&self._nodes, item)
        node.previous = self._newest
        node.next = NONE
        if self._newest == NONE:
            self._oldest = item
        else:
            node_at(&self._nodes, self._newest).next = item
        self._newest = item
        self._in_flight += 1

    cdef void _unlink(self, uint32_t item) noexcept:
        """Remove something from the list of things in flight."""
        cdef Node* node = node_at(&self._nodes, item)
        if node.previous == NONE:
            self._oldest = node.next
        else:
            node_at(&self._nodes, node.previous).next = node.next
        if node.next == NONE:
            self._newest = node.previous
        else:
            node_at(&self._nodes, node.next).previous = node.previous
        self._in_flight -= 1

    cdef void _charge_message(self, Message* message) noexcept:
        cdef uint64_t size = <uint64_t>message.key_size + message.value_size
        self._messages += 1
        self._message_bytes += size
        self._used += size + MESSAGE_CHARGE

    cdef void _free_message(self, Message* message) noexcept:
        cdef uint64_t size = <uint64_t>message.key_size + message.value_size
        self._messages -= 1
        self._message_bytes -= size
        self._used -= size + MESSAGE_CHARGE
        free(message)

    cdef void _free_messages(self, Node* node) noexcept:
        cdef PrefixPart* part = &node.part.prefix
        cdef Message* message
        while part.first != NULL:
            message = part.first
            part.first = message.next
            self._free_message(message)
        free(part.index)
        part.index = NULL

    cdef int _hold(self, uint32_t item, LedgerSource source, uint64_t position) except -1:
        """While this is in flight, the source must be read again from `position`."""
        cdef Node* node = node_at(&self._nodes, item)
        cdef uint32_t at = node.holds
        cdef Hold* hold
        while at != NONE:
            hold = hold_at(&self._holds, at)
            if hold.source == source.number:
                if position < hold.position:
                    hold.position = position
                    heap_rise(&source.heap, &self._holds, hold.at)
                return 0
            at = hold.next
        at = slab_take(&self._holds)
        if at == NONE:
            raise MemoryError
        hold = hold_at(&self._holds, at)
        hold.position = position
        hold.source = source.number
        hold.next = node.holds
        if not heap_add(&source.heap, &self._holds, at):
            slab_give(&self._holds, at)
            raise MemoryError
        node.holds = at
        self._used += HOLD_CHARGE
        return 0

    cdef void _drop_hold(self, uint32_t at) noexcept:
        cdef LedgerSource source = <LedgerSource>self._sources[hold_at(&self._holds, at).source]
        heap_remove(&source.heap, &self._holds, at)
        slab_give(&self._holds, at)
        self._used -= HOLD_CHARGE

    cdef void _remove_in_flight(self, uint32_t item) noexcept:
        """Release its share and its positions."""
        cdef Node* node = node_at(&self._nodes, item)
        cdef uint32_t at = node.holds
        cdef uint32_t next_
        self._unlink(item)
        share_release(self._shares, &self._nodes, item)
        while at != NONE:
            next_ = hold_at(&self._holds, at).next
            self._drop_hold(at)
            at = next_
        node.holds = NONE

    cdef void _adopt(self, uint32_t payload, uint32_t prefix) noexcept:
        cdef Node* owner = node_at(&self._nodes, payload)
        cdef Node* node = node_at(&self._nodes, prefix)
        node.kind = ANNOUNCED
        node.whose.owner = payload
        node.part.prefix.sibling = owner.part.payload.prefixes
        owner.part.payload.prefixes = prefix

    cdef int _join_waiting(self, uint32_t payload, uint32_t prefix) except -1:
        """Add a prefix that waited for a header to its payload, with its age and its holds."""
        cdef Node* owner = node_at(&self._nodes, payload)
        cdef Node* node = node_at(&self._nodes, prefix)
        cdef Node* other
        cdef uint32_t hold = node.holds
        cdef uint32_t next_, before
        share_join(self._shares, &self._nodes, payload, prefix)
        if node.serial < owner.serial:
            # The payload takes the place of the older one, so that the list stays in order of age.
            owner.since = node.since
            owner.serial = node.serial
            before = node.previous
            if before != payload:
                self._unlink(payload)
                before = node.previous
                owner.previous = before
                owner.next = prefix
                if before == NONE:
                    self._oldest = payload
                else:
                    other = node_at(&self._nodes, before)
                    other.next = payload
                node.previous = payload
                self._in_flight += 1
        self._unlink(prefix)
        node.holds = NONE
        while hold != NONE:
            next_ = hold_at(&self._holds, hold).next
            source = self._sources[hold_at(&self._holds, hold).source]
            self._hold(payload, <LedgerSource>source, hold_at(&self._holds, hold).position)
            self._drop_hold(hold)
            hold = next_
        return 0

    cdef void _advance(self, LedgerSource source, uint64_t next_) noexcept:
        """The source has sent everything before `next_`."""
        if source.placed and next_ <= source.next:
            return
        source.placed = True
        if source.next < source.seen_before <= next_ and self._replaying:
            self._replaying -= 1
        source.next = next_

    cdef object _position(self, LedgerSource source):
        if source.heap.count:
            return min(hold_at(&self._holds, source.heap.holds[0]).position, source.next)
        return source.next

    cdef tuple _prefixes(self, Node* payload):
        cdef uint32_t prefix = payload.part.payload.prefixes
        cdef list found = []
        while prefix != NONE:
            node = node_at(&self._nodes, prefix)
            found.append(key_of(node))
            prefix = node.part.prefix.sibling
        return tuple(found)
