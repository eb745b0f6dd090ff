"""The end of a stream that is open for writing, and the write that moves it.

Owns how the end advances: the hashes of the entries up to it, the bytes of header, record and mark
(`records.py` has their layout), their restoration if a write fails, and the writer's counters.
Whether a commit may begin, `_lane.pyx` decides.
"""

cimport cython
from cpython.buffer cimport PyBUF_WRITABLE, PyBuffer_Release, PyObject_GetBuffer
from cpython.bytes cimport PyBytes_FromStringAndSize
from cpython.object cimport PyObject
from cpython.ref cimport Py_INCREF
from libc.stdint cimport uint8_t, uint64_t
from libc.string cimport memcpy, memmove

from datastreamer._entry cimport HEADER_PAGE_SIZE, put_u64
from datastreamer._packer cimport Packed
from datastreamer.storage.disk._commit cimport Descriptor, Span, descriptor_of, now_ns, write_packed
from datastreamer.storage.header._heads cimport entries_of, length_of
from datastreamer.storage.pages._page_sums cimport PageSums
from datastreamer.storage.pages._xxh3 cimport xxh3_of_33_to_96

from datastreamer.metrics import writer_numbers
from datastreamer.metrics.names import TIME_BOUNDS_NS
from datastreamer.storage.header.records import COMMIT_LAYOUT
from datastreamer.storage.pages.hashes import EndSum

from xxhash import xxh3_64_intdigest, xxh3_128

cdef hash_of = xxh3_64_intdigest
# Without a look-up for each call.
cdef copy_hash = xxh3_128.copy
cdef update_hash = xxh3_128.update
cdef digest_hash = xxh3_128.digest
cdef type SUM_TYPE = EndSum

cdef extern from *:
    """
    #include <stdint.h>
    /* Only the holder of the locks writes; other processes read at any time, and need whole
       numbers in no particular order. */
    static inline void add_to(uint64_t *slot, uint64_t more) {
        __atomic_store_n(slot, *slot + more, __ATOMIC_RELAXED);
    }
    """
    void add_to(uint64_t* slot, uint64_t more) noexcept nogil

cdef extern from "Python.h":
    # A borrowed reference.
    PyObject* PyTuple_GET_ITEM(object, Py_ssize_t at) noexcept
    void PyTuple_SET_ITEM(object, Py_ssize_t at, PyObject* item) noexcept
    ctypedef struct PyTypeObject:
        object (*tp_alloc)(type kind, Py_ssize_t count)

cdef enum:
    MOST_BOUNDS = 32

# The slots of the counters, from `metrics/writer_numbers.py`.
cdef uint64_t[MOST_BOUNDS] BOUNDS
cdef Py_ssize_t BOUND_COUNT = len(TIME_BOUNDS_NS)
cdef Py_ssize_t SLOTS = writer_numbers.SLOTS
cdef Py_ssize_t ENTRIES = writer_numbers.ENTRIES
cdef Py_ssize_t BYTES = writer_numbers.BYTES
cdef Py_ssize_t FAILURES = writer_numbers.FAILURES
cdef Py_ssize_t COMMIT_NS = writer_numbers.COMMIT_NS
cdef Py_ssize_t COMMIT_BUCKETS = writer_numbers.COMMIT_BUCKETS
cdef Py_ssize_t SYNC_NS = writer_numbers.SYNC_NS
cdef Py_ssize_t SYNC_BUCKETS = writer_numbers.SYNC_BUCKETS
if BOUND_COUNT > MOST_BOUNDS:
    raise ImportError("MOST_BOUNDS is too small for the writer's counters")
for _at, _bound in enumerate(TIME_BOUNDS_NS):
    BOUNDS[_at] = _bound

# Where a commit's bytes are in the header page, from `records.py`.
cdef Py_ssize_t TOTALS, ENDS, RECORD_END, MARK, MARK_END, SLOT_SEQUENCE, SLOT_TOTALS, SLOT_END
cdef Py_ssize_t[2] SYNCED_SLOTS
cdef Span NOTHING, BEFORE_SYNC, AFTER_SYNC, WITHOUT_SYNC
TOTALS, ENDS, RECORD_END, MARK, MARK_END, _before, _after, _without, _slots, _parts = COMMIT_LAYOUT
BEFORE_SYNC.start, BEFORE_SYNC.end = _before
AFTER_SYNC.start, AFTER_SYNC.end = _after
WITHOUT_SYNC.start, WITHOUT_SYNC.end = _without
SYNCED_SLOTS[0], SYNCED_SLOTS[1] = _slots
SLOT_SEQUENCE, SLOT_TOTALS, SLOT_END = _parts


cdef void observe(uint64_t* numbers, Py_ssize_t total, Py_ssize_t first,
                  uint64_t took) noexcept nogil:
    """Add a time, in ns, to a histogram."""
    cdef Py_ssize_t i = 0
    while i < BOUND_COUNT and took > BOUNDS[i]:
        i += 1
    add_to(numbers + first + i, 1)
    add_to(numbers + total, took)


@cython.no_gc_clear  # `_hold` refers to the page's memory until deallocation
cdef class StreamEnd:
    """The end of a stream that is open for writing, and the header page that records it.

    `written` is the end, `sums` the hashes of the entries up to it. `base` is known to be on disk;
    the sync in progress began at `mid` (without one, mid is base); `base_sum` and `mid_sum` are
    the hashes up to these. `commits` is the number of commits, `durable` the number of those known
    to be on disk. `sequence` is that of the newest synced header in the page. For one thread at a
    time, which holds the owner's lock.
    """

    def __cinit__(self, file, page, head, PageSums sums not None):
        """`file` is a `file_ops.File`; `page`, a bytearray, is exported, so its size is fixed.

        Everything up to `head` is on disk, and has the hashes `sums`.
        """
        if len(page) != HEADER_PAGE_SIZE:
            raise ValueError("a header page has 4096 bytes")
        PyObject_GetBuffer(page, &self._hold, PyBUF_WRITABLE)
        self._page = page
        self._bytes = <uint8_t*>self._hold.buf
        self._file = file
        self._head = type(head)
        self.count_in(None)
        self.written = head
        self.sums = sums
        self.all_on_disk(head)

    def __dealloc__(self):
        PyBuffer_Release(&self._hold)
        PyBuffer_Release(&self._counters)

    def count_in(self, memory):
        """Move the counters to `memory` (None: to memory of its own). The layout is that of
        `metrics.writer_numbers`."""
        cdef Py_buffer found
        PyObject_GetBuffer(bytearray(SLOTS * 8) if memory is None else memory, &found,
                           PyBUF_WRITABLE)
        if found.len < SLOTS * 8:
            PyBuffer_Release(&found)
            raise ValueError("the memory is too small for the counters")
        if self._counters.buf != NULL:
            memmove(found.buf, self._counters.buf, SLOTS * 8)
            PyBuffer_Release(&self._counters)
        self._counters = found

    def synced_in(self, uint64_t ns):
        """Count a sync of `ns` that was not part of a commit."""
        observe(numbers_of(self), SYNC_NS, SYNC_BUCKETS, ns)

    def refused(self):
        """Count a write or sync that failed and was not part of a commit."""
        add_to(numbers_of(self) + FAILURES, 1)

    cpdef all_on_disk(self, head):
        """Everything up to `head`, the end, is on disk."""
        self.base = self.mid = head
        self.base_sum = self.mid_sum = self.sums.sum()

    def put(self, base, mid, after, base_sum, mid_sum, after_sum, seen):
        """Advance header and record, which the page has already, to `after`, and the mark to
        `seen`. Changes only the bytes that commits change.
        """
        chain, _, tail = after_sum
        self._put(base, mid, after, base_sum, mid_sum, chain, tail, seen)

    cdef int _put(self, base, mid, after, base_sum, mid_sum, bytes chain, bytes tail,
                  seen) except -1:
        cdef uint8_t* page = self._bytes
        cdef uint8_t* sums = page + ENDS + 48
        put_head(page + TOTALS, after)
        put_head(page + ENDS, base)
        put_head(page + ENDS + 16, mid)
        put_head(page + ENDS + 32, after)
        put_hashes(sums, <object>PyTuple_GET_ITEM(base_sum, 0),
                   <object>PyTuple_GET_ITEM(base_sum, 2))
        put_hashes(sums + 32, <object>PyTuple_GET_ITEM(mid_sum, 0),
                   <object>PyTuple_GET_ITEM(mid_sum, 2))
        put_hashes(sums + 64, chain, tail)
        put_sum(page, 0, RECORD_END)
        put_head(page + MARK_END - 16, seen)
        put_u64(page + MARK_END,
                xxh3_of_33_to_96(page + MARK, MARK_END - MARK))
        return 0

    cdef int _put_synced(self, head) except -1:
        """Put a newer synced header, which ends at `head`, into the other slot of the page."""
        cdef uint8_t* page = self._bytes
        cdef Py_ssize_t slot = SYNCED_SLOTS[(self.sequence + 1) & 1]
        memcpy(page + slot, page + SYNCED_SLOTS[self.sequence & 1], SLOT_END)
        self.sequence += 1
        put_u64(page + slot + SLOT_SEQUENCE, self.sequence)
        put_head(page + slot + SLOT_TOTALS, head)
        put_sum(page, slot, slot + SLOT_END)
        return 0

    cpdef commit(self, packer, PageSums placed, seen, bint sync, wakers):
        """Advance the end over the packer's entries, in the page and in the file; returns it.

        `placed` are the hashes up to the end of the part of the operation that was placed before
        (None: no part was). Readers may read up to `seen` (None: to the new end). Leaves the state
        WRITING, which the caller ends. Raises as `Descriptor.commit`, with page and end unchanged.
        """
        cdef Packed packed = packer
        cdef uint8_t* page = self._bytes
        cdef uint8_t[HEADER_PAGE_SIZE] old
        cdef size_t changed = WITHOUT_SYNC.end
        cdef uint64_t sequence = self.sequence
        cdef uint64_t began = now_ns()
        cdef uint64_t sync_ns = 0
        cdef uint64_t entries, length
        cdef PageSums sums
        cdef Descriptor descriptor
        cdef Span before, after
        # `Head(...)`, without the cost of the call.
        head = (<PyTypeObject*>self._head).tp_alloc(self._head, 2)
        set_item(head, 0, packed._offset)
        set_item(head, 1, packed._number)
        # Copies, so that a commit that failed can be repeated.
        if placed is None and in_last_page(self.sums, packed):
            sums = self.sums
            tail = copy_hash(sums._tail)
            packed._arena.used = packed._used
            update_hash(tail, packed._arena)
        else:
            sums = (self.sums if placed is None else placed).copy()
            for offset, part in packed.entry_parts():
                sums.add(part, offset)
            tail = sums._tail
        digest = digest_hash(tail)
        before = BEFORE_SYNC
        if sync:
            after = AFTER_SYNC
        elif seen is None:
            before, after = NOTHING, WITHOUT_SYNC
        else:
            after = NOTHING
        # First: a signal's handler may raise wherever Python code runs.
        self._state = WRITING
        memcpy(old, page, changed)
        try:
            self._put(self.base, self.mid, head, self.base_sum, self.mid_sum, sums._chain, digest,
                      head if seen is None else seen)
            if sync:
                self._put_synced(head)
            descriptor = descriptor_of(self._file)
            if descriptor is not None:
                write_packed(descriptor._fd, packed, <char*>page, before, after, sync,
                             wakers, &sync_ns)
            else:
                self._file.commit(packer, self._page, (before.start, before.end),
                                  (after.start, after.end), sync, wakers)
        except OSError:
            memcpy(page, old, changed)
            self.sequence = sequence
            add_to(numbers_of(self) + FAILURES, 1)
            raise
        length, entries = length_of(self.written), entries_of(self.written)
        add_to(numbers_of(self) + ENTRIES, <uint64_t>packed._number - entries)
        add_to(numbers_of(self) + BYTES, <uint64_t>packed._offset - length)
        if sync_ns:
            observe(numbers_of(self), SYNC_NS, SYNC_BUCKETS, sync_ns)
        self._ended = now_ns()
        observe(numbers_of(self), COMMIT_NS, COMMIT_BUCKETS, self._ended - began)
        if sums is self.sums:
            sums._tail = tail
            sums._end = packed._offset
        else:
            self.sums = sums
        self.written = head
        self.commits += 1
        if sync:
            self.durable = self.commits
            self.base = self.mid = head
            # `EndSum(...)`, without the cost of the call.
            known = (<PyTypeObject*>SUM_TYPE).tp_alloc(SUM_TYPE, 3)
            set_item(known, 0, sums._chain)
            set_item(known, 1, sums._chained_from)
            set_item(known, 2, digest)
            self.base_sum = self.mid_sum = known
        return head


cdef inline uint64_t* numbers_of(StreamEnd end) noexcept:
    """The counters."""
    return <uint64_t*>end._counters.buf


cdef inline int set_item(new, Py_ssize_t at, item) except -1:
    Py_INCREF(item)
    PyTuple_SET_ITEM(new, at, <PyObject*>item)
    return 0


cdef inline int put_head(uint8_t* p, head) except -1:
    put_u64(p, length_of(head))
    put_u64(p + 8, entries_of(head))
    return 0


cdef int put_sum(uint8_t* page, Py_ssize_t start, Py_ssize_t end) except -1:
    """Put the xxh3 of a record right after it."""
    record = PyBytes_FromStringAndSize(<char*>page + start, end - start)
    put_u64(page + end, <uint64_t>hash_of(record))
    return 0


cdef inline bint in_last_page(PageSums sums, Packed packed) noexcept:
    """Whether all packed entries are in the page that the hashes end in: the usual case."""
    return (packed._count == 1 and not packed._segments[0].padded
            and packed._segments[0].file_offset < sums._page_end)


cdef int put_hashes(uint8_t* p, bytes chain, bytes tail) except -1:
    if len(chain) != 16 or len(tail) != 16:
        raise ValueError("a hash has 16 bytes")
    memcpy(p, <const uint8_t*>chain, 16)
    memcpy(p + 16, <const uint8_t*>tail, 16)
    return 0
