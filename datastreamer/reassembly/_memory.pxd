"""The ledger's fields and methods, for `_reassembler.pyx`; see `_memory.pyx`."""

from libc.stdint cimport uint8_t, uint16_t, uint32_t, uint64_t

from datastreamer.reassembly._shares cimport Share
from datastreamer.reassembly._slab cimport Slab
from datastreamer.reassembly._state cimport Heap, Message, Node, Table

cdef bytes id_of(Node* payload)
cdef bytes key_of(Node* prefix)


cdef class LedgerSource:
    cdef str name
    cdef uint16_t number
    cdef uint64_t next         # the next position; everything before it has been received
    cdef uint64_t seen_before  # how far the previous run had read it
    cdef bint placed           # whether it has positions
    cdef Heap heap
    cdef uint64_t received, duplicates, conflicts, malformed, outside


cdef class Ledger:
    cdef Slab _nodes
    cdef Slab _holds
    cdef Table _table
    cdef uint64_t[2] _secret
    cdef uint32_t _oldest, _newest             # in flight
    cdef uint32_t _first_known, _last_known    # delivered, in order
    cdef uint32_t _next_to_strip
    cdef uint64_t _used, _budget
    cdef uint64_t _serial                      # of the last message
    cdef uint64_t _in_flight, _messages, _message_bytes
    cdef uint64_t _known, _fresh, _forgettable, _threshold
    cdef uint64_t _completed, _dropped
    cdef uint32_t _replaying                   # sources that replay entries of the previous run
    cdef double _now, _max_age
    cdef bint _ages, _busy
    cdef list _events
    cdef list _sources
    cdef Share* _shares                        # one per source
    cdef uint32_t _shares_capacity
    cdef dict _by_name
    cdef object _last_name
    cdef LedgerSource _last_source

    cdef int _enter(self) except -1
    cdef tuple _take_events(self)
    cdef LedgerSource _source(self, name)
    cdef int _open_share(self, uint32_t number) except -1
    cdef int _resume(self, resume) except -1
    cdef void _add_known(self, uint32_t payload) noexcept
    cdef void _forget(self) noexcept
    cdef void _strip_prefixes(self, Node* payload) noexcept
    cdef int _enforce_budget(self) except -1
    cdef int _pass_time(self, now) except -1
    cdef uint32_t _above_share(self) noexcept
    cdef int _drop(self, uint32_t at, str why) except -1
    cdef uint32_t _find(self, const uint8_t* key) noexcept
    cdef uint32_t _new_node(self, const uint8_t* key, uint8_t kind) except? 0xFFFFFFFF
    cdef void _remove_node(self, uint32_t item) noexcept
    cdef void _add_in_flight(self, uint32_t item) noexcept
    cdef void _unlink(self, uint32_t item) noexcept
    cdef void _charge_message(self, Message* message) noexcept
    cdef void _free_message(self, Message* message) noexcept
    cdef void _free_messages(self, Node* node) noexcept
    cdef int _hold(self, uint32_t item, LedgerSource source, uint64_t position) except -1
    cdef void _drop_hold(self, uint32_t at) noexcept
    cdef void _remove_in_flight(self, uint32_t item) noexcept
    cdef void _adopt(self, uint32_t payload, uint32_t prefix) noexcept
    cdef int _join_waiting(self, uint32_t payload, uint32_t prefix) except -1
    cdef void _advance(self, LedgerSource source, uint64_t next_) noexcept
    cdef object _position(self, LedgerSource source)
    cdef tuple _prefixes(self, Node* payload)
