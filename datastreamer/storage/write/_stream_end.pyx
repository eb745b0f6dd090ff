"""The end of a stream that is open for writing, the header page that records it, and operations of
one call.

Owns how the end advances: the hashes of the entries up to it, the bytes of header, record and
mark (`records.py` has their layout), and their restoration if a write fails. What needs a decision
takes the steps of `atomic_op.py` and `writer.py`.
"""

cimport cython
from cpython.buffer cimport PyBUF_WRITABLE, PyBuffer_Release, PyObject_GetBuffer
from cpython.bytes cimport PyBytes_FromStringAndSize
from cpython.object cimport PyObject
from cpython.ref cimport Py_INCREF
from libc.stdint cimport int64_t, uint8_t, uint64_t
from libc.string cimport memcpy
from posix.unistd cimport write

from datastreamer._entry cimport HEADER_PAGE_SIZE, put_u64
from datastreamer._packer cimport Packed, pack_operation
from datastreamer.storage.bookmarks._pairs cimport ReportedBookmarks
from datastreamer.storage.disk._commit cimport (
    Descriptor, Span, coarse_ns, descriptor_of, now_ns, write_packed,
)
from datastreamer.storage.header._heads cimport entries_of, length_of
from datastreamer.storage.pages._page_sums cimport PageSums
from datastreamer.storage.pages._xxh3 cimport xxh3_of_33_to_96
from datastreamer.storage.read._head cimport HeadCell

from datastreamer.metrics import writer_numbers
from datastreamer.metrics.names import TIME_BOUNDS_NS
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
    #if defined(__linux__)
    #include <sched.h>
    static inline uint64_t this_cpu(void) { return (uint64_t)sched_getcpu(); }
    #else
    static inline uint64_t this_cpu(void) { return 0; }
    #endif
    static inline void add_to(uint64_t *slot, uint64_t more) {
        __atomic_store_n(slot, *slot + more, __ATOMIC_RELAXED);
    }
    """
    uint64_t this_cpu() noexcept nogil
    void add_to(uint64_t* slot, uint64_t more) noexcept nogil

cdef extern from "Python.h":
    # A borrowed reference.
    PyObject* PyTuple_GET_ITEM(object, Py_ssize_t at) noexcept
    void PyTuple_SET_ITEM(object, Py_ssize_t at, PyObject* item) noexcept
    ctypedef struct PyTypeObject:
        object (*tp_alloc)(type kind, Py_ssize_t count)

cdef enum:
    MOST_BOUNDS = 32
    MOST_SLOTS = 128
    # A thread that has waited this long for a commit is assumed to be asleep.
    PAUSE_NS = 100_000
    # The write of a longer operation takes longer than the thread takes to wake.
    MOST_EARLY = 64 * 1024

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
if BOUND_COUNT > MOST_BOUNDS or SLOTS > MOST_SLOTS:
    raise ImportError("MOST_BOUNDS or MOST_SLOTS is too small for the writer's counters")
for _at, _bound in enumerate(TIME_BOUNDS_NS):
    BOUNDS[_at] = _bound


cdef void observe(uint64_t* numbers, Py_ssize_t total, Py_ssize_t first,
                  uint64_t took) noexcept nogil:
    """Add a time, in ns, to a histogram."""
    cdef Py_ssize_t i = 0
    while i < BOUND_COUNT and took > BOUNDS[i]:
        i += 1
    add_to(numbers + first + i, 1)
    add_to(numbers + total, took)

@cython.final
@cython.no_gc_clear  # `_hold` refers to the page's memory until deallocation
cdef class StreamEnd:
    """The end of a stream that is open for writing, and the header page that records it.

    `written` is the end, `sums` the hashes of the entries up to it. `base` is known to be on disk;
    the sync in progress began at `mid` (without one, mid is base); `base_sum` and `mid_sum` are
    the hashes up to these. `unfinished` is true from the first write of a commit or
    change until its end. `commits` is the number of commits, `durable` the number of those known to
    be on disk. A commit that ends at or before offset `limit` needs no check by the writer, only
    its writes, and a sync if `synced` is true; it does not become visible if `hidden` is true, and
    is one that does not wait; -1: each commit needs a check. `sequence` is that of the
    newest synced header in the page. For one thread at a time; only `commit_on` locks.
    """

    cdef public object written
    cdef public object base
    cdef public object mid
    cdef public object base_sum
    cdef public object mid_sum
    cdef public PageSums sums
    cdef public bint unfinished
    cdef public int64_t limit
    cdef public bint synced
    cdef public bint hidden
    cdef public int64_t commits
    cdef public int64_t durable
    cdef public uint64_t sequence
    # When a commit next has to check the file's path first, by the coarse clock.
    cdef uint64_t _look_at
    cdef object _file
    cdef object _owner
    # When the last commit ended, in ns.
    cdef uint64_t _ended
    # Of the owner: its reader's cell, its lock's methods, and its lists.
    cdef HeadCell _cell
    cdef object _acquire, _release
    cdef list _wakers, _inside_wakers, _early_wakers
    cdef type _head
    cdef object _page
    cdef uint8_t* _bytes
    cdef Py_buffer _hold
    # The counters: in `_own` until they are shared, then in the buffer that `_shared` holds.
    cdef uint64_t[MOST_SLOTS] _own
    cdef uint64_t* _numbers
    cdef Py_buffer _shared
    cdef bint _is_shared
    cdef Py_ssize_t _totals, _ends, _record_end, _mark, _mark_end
    cdef Py_ssize_t[2] _slots
    cdef Py_ssize_t _slot_sequence, _slot_totals, _slot_end
    cdef Span _nothing, _before_sync, _after_sync, _without_sync

    def __init__(self, file, page, head, PageSums sums not None, layout):
        """`file` is a `file_ops.File`; `page`, a bytearray, is exported, so its size is fixed.

        Everything up to `head` is on disk, and has the hashes `sums`. `layout` is
        `records.COMMIT_LAYOUT`.
        """
        cdef Py_ssize_t where
        if self._bytes != NULL:
            raise RuntimeError("a StreamEnd is initialised once")
        (self._totals, self._ends, self._record_end, self._mark, self._mark_end,
         before, after, without, slots, parts) = layout
        self._slots[0], self._slots[1] = slots
        self._slot_sequence, self._slot_totals, self._slot_end = parts
        self._before_sync.start, self._before_sync.end = before
        self._after_sync.start, self._after_sync.end = after
        self._without_sync.start, self._without_sync.end = without
        for where in (*layout[:5], *before, *after, *without,
                      *[start + part for start in slots for part in (0, *parts)]):
            if not 0 <= where <= HEADER_PAGE_SIZE - 64:
                raise ValueError("a record is outside the page")
        if not 33 <= self._mark_end - self._mark <= 64:
            raise ValueError("the visible mark has another size than its sum is computed for")
        if len(page) != HEADER_PAGE_SIZE:
            raise ValueError("a header page has 4096 bytes")
        PyObject_GetBuffer(page, &self._hold, PyBUF_WRITABLE)
        self._page = page
        self._bytes = <uint8_t*>self._hold.buf
        self._file = file
        self._head = type(head)
        self._numbers = self._own
        self.limit = -1
        self.written = head
        self.sums = sums
        self.all_on_disk(head)

    def belong_to(self, owner):
        """Commit with the locks of the `OwnedFile` `owner`, move its head, and wake those that it
        lists. Call it again when it has another reader; lock and lists stay."""
        self._owner = owner
        self._cell = owner.reader.cell
        self._acquire, self._release = owner.lock.acquire, owner.lock.release
        self._wakers, self._inside_wakers = owner.wakers, owner.inside_wakers
        self._early_wakers = owner.early_wakers

    def __dealloc__(self):
        if self._bytes != NULL:
            PyBuffer_Release(&self._hold)
        if self._is_shared:
            PyBuffer_Release(&self._shared)

    def count_in(self, memory):
        """Move the counters to `memory` (None: to memory of its own). The layout is that of
        `metrics.writer_numbers`."""
        cdef Py_buffer found
        cdef uint64_t* numbers = self._own
        if memory is not None:
            PyObject_GetBuffer(memory, &found, PyBUF_WRITABLE)
            if found.len < SLOTS * 8:
                PyBuffer_Release(&found)
                raise ValueError("the memory is too small for the counters")
            numbers = <uint64_t*>found.buf
        if numbers != self._numbers:
            memcpy(numbers, self._numbers, SLOTS * 8)
        self._numbers = numbers
        if self._is_shared:
            PyBuffer_Release(&self._shared)
        self._is_shared = memory is not None
        if self._is_shared:
            self._shared = found

    def synced_in(self, uint64_t ns):
        """Count a sync of `ns` that was not part of a commit."""
        observe(self._numbers, SYNC_NS, SYNC_BUCKETS, ns)

    def refused(self):
        """Count a write or sync that failed and was not part of a commit."""
        add_to(self._numbers + FAILURES, 1)

    @property
    def look_due(self):
        """Whether the writer has to check where the file's path leads before the next commit."""
        return coarse_ns() >= self._look_at

    def looking(self):
        """The time at which a check begins, for `looked`."""
        return coarse_ns()

    def looked(self, uint64_t began, double seconds):
        """A check that began then found the file at its path: `look_due` is false for `seconds`
        from then on."""
        self._look_at = began + <uint64_t>(seconds * 1e9)

    def look_again(self):
        """Make `look_due` true."""
        self._look_at = 0

    @property
    def ready(self):
        """Whether the next operation may begin without a check."""
        return self.limit >= 0 and not self.unfinished

    def commit_on(self, packer, writer, bint wait):
        """`commit` the packer's entries, visible on return if this is to `wait`, unless the writer
        has to check something first: then does nothing and returns None. Returns the new end.

        Requires `belong_to`. `writer.not_committed` raises the error for an `OSError`.
        """
        return self._commit_on(packer, writer, wait)

    cdef _commit_on(self, Packed packed, writer, bint wait):
        if self.hidden:
            return None if wait else self._commit_locked(packed, writer, False, True)
        if not self.synced:
            return self._commit_locked(packed, writer, False, False)
        if not wait:
            return None
        syncing = self._owner.syncing
        syncing.acquire()
        try:
            return self._commit_locked(packed, writer, True, False)
        finally:
            syncing.release()

    cdef _commit_locked(self, Packed packed, writer, bint sync, bint hidden):
        self._acquire()
        try:
            # First: it runs Python code.
            if coarse_ns() >= self._look_at and self._owner.look():
                return None
            if (packed._offset > self.limit or self.unfinished or self.synced != sync
                    or self.hidden != hidden):
                return None
            # Earlier commits that become durable with it have to be reported.
            if sync and self.base is not self.written:
                return None
            try:
                if hidden:
                    head = self.commit(packed, None, self._cell.now.head, False, ())
                else:
                    head = self.commit(packed, None, None, sync, self._wakers)
            except OSError as error:
                writer.not_committed(error)
            if self.sums._finished:
                writer.pages_finished()
            if hidden:
                self.unfinished = False
                return head
            self._cell.publish(head)
            self.unfinished = False
            if self._inside_wakers:
                self._owner.wake_inside()
            return head
        finally:
            self._release()

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
        cdef uint8_t* sums = page + self._ends + 48
        put_head(page + self._totals, after)
        put_head(page + self._ends, base)
        put_head(page + self._ends + 16, mid)
        put_head(page + self._ends + 32, after)
        put_hashes(sums, <object>PyTuple_GET_ITEM(base_sum, 0),
                   <object>PyTuple_GET_ITEM(base_sum, 2))
        put_hashes(sums + 32, <object>PyTuple_GET_ITEM(mid_sum, 0),
                   <object>PyTuple_GET_ITEM(mid_sum, 2))
        put_hashes(sums + 64, chain, tail)
        put_sum(page, 0, self._record_end)
        put_head(page + self._mark_end - 16, seen)
        put_u64(page + self._mark_end,
                xxh3_of_33_to_96(page + self._mark, self._mark_end - self._mark))
        return 0

    cdef int _put_synced(self, head) except -1:
        """Put a newer synced header, which ends at `head`, into the other slot of the page."""
        cdef uint8_t* page = self._bytes
        cdef Py_ssize_t slot = self._slots[(self.sequence + 1) & 1]
        memcpy(page + slot, page + self._slots[self.sequence & 1], self._slot_end)
        self.sequence += 1
        put_u64(page + slot + self._slot_sequence, self.sequence)
        put_head(page + slot + self._slot_totals, head)
        put_sum(page, slot, slot + self._slot_end)
        return 0

    cpdef commit(self, packer, PageSums placed, seen, bint sync, wakers):
        """Advance the end over the packer's entries, in the page and in the file; returns it.

        `placed` are the hashes up to the end of the part of the operation that was placed before
        (None: no part was). Readers may read up to `seen` (None: to the new end). Leaves `unfinished`
        true; the caller resets it. Raises as `Descriptor.commit`, with page and end unchanged.
        """
        cdef Packed packed = packer
        cdef uint8_t* page = self._bytes
        cdef uint8_t[HEADER_PAGE_SIZE] old
        cdef size_t changed = self._without_sync.end
        cdef uint64_t sequence = self.sequence
        cdef uint64_t began = now_ns()
        cdef uint64_t sync_ns = 0
        cdef uint64_t entries, length
        cdef PageSums sums
        cdef Descriptor descriptor
        cdef Span before, after
        if (self._early_wakers and began - self._ended > PAUSE_NS and seen is None and not sync
                and packed._offset - length_of(self.written) <= MOST_EARLY):
            wake_early(self._early_wakers)
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
        before = self._before_sync
        if sync:
            after = self._after_sync
        elif seen is None:
            before, after = self._nothing, self._without_sync
        else:
            after = self._nothing
        # First: a signal's handler may raise wherever Python code runs.
        self.unfinished = True
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
                self._file.commit(packer.arena, packer.segments, self._page,
                                  (before.start, before.end), (after.start, after.end), sync,
                                  wakers)
        except OSError:
            memcpy(page, old, changed)
            self.sequence = sequence
            add_to(self._numbers + FAILURES, 1)
            raise
        length, entries = length_of(self.written), entries_of(self.written)
        add_to(self._numbers + ENTRIES, <uint64_t>packed._number - entries)
        add_to(self._numbers + BYTES, <uint64_t>packed._offset - length)
        if sync_ns:
            observe(self._numbers, SYNC_NS, SYNC_BUCKETS, sync_ns)
        self._ended = now_ns()
        observe(self._numbers, COMMIT_NS, COMMIT_BUCKETS, self._ended - began)
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


@cython.final
cdef class Appender:
    """Whether an operation may begin, and the operations that are packed and committed in one call.

    `lease`: only its holder may begin operations; while there is one, no entries are changed.
    `committing` is true from the begin of a commit until it is about to return. `commit_guard` is
    called before each commit, which is not written if it raises.
    """

    cdef public object lease
    cdef public bint committing
    cdef public object commit_guard
    cdef Packed _packer
    # None for a stream that is open for reading.
    cdef object _writer
    cdef StreamEnd _end
    cdef object _keeper
    cdef ReportedBookmarks _recent

    def __init__(self, packer, writer, keeper):
        """`packer` is the `AtomicOp`, `keeper` the `BookmarkKeeper`."""
        self._packer = packer
        self._writer = writer
        if writer is not None:
            self._end, self._keeper, self._recent = writer.end, keeper, keeper.recent

    cdef append(self, type, tuple items, bookmark, bint single):
        """Append a bookmark (None: without) and an event for each item in an operation; returns
        the number after it. `single`: one event, whose type is a number."""
        cdef Packed packer = self._packer
        cdef StreamEnd end = self._end
        if (self.commit_guard is not None and end is not None and not packer._open
                and not self.committing):
            self.commit_guard()
        # No Python code runs between these checks and `committing`: another thread that lends the
        # stream comes before or after.
        if (end is None or packer._open or self.committing or self.lease is not None
                or end.limit < 0 or end.unfinished):
            return packer._append_stepwise(type, items, bookmark, single)
        written = end.written
        self.committing = True
        try:
            head = None
            if pack_operation(packer, length_of(written), entries_of(written), type, items,
                              bookmark):
                head = end._commit_on(packer, self._writer, True)
                packer._open = False
        except Exception as error:
            if self._writer.owned.interrupted:
                packer._open = False
            self.committing = False
            packer._roll_back_after(error)
            raise
        except BaseException:
            packer._open = False
            raise
        if head is None:
            self.committing = False
            return packer._append_stepwise(type, items, bookmark, single)
        if self._recent.report(packer._bookmarks, entries_of(written), head, end.base):
            self._keeper.wake()
        self.committing = False
        return entries_of(head)


cdef class Appending:
    """The methods of `DataStream` that append in one call, without a frame of Python around it."""

    # The subclass sets it.
    cdef public Appender _appender

    @cython.nonecheck(True)
    def append(self, type, data, *, bookmark=None):
        """Append an event in an atomic operation of its own, after a bookmark if one is given;
        returns the event's number.

        Durable on return as the sync policy says. `type`, `data` and `bookmark` as for `add_entry`
        and `add_bookmark`. If it raises, nothing was appended, but for `CommitInDoubt`: the errors
        are those of `add_entry`, `start_atomic_op`, and of leaving an `atomic_op` block.
        """
        return self._appender.append(type, (data,), bookmark, True) - 1

    @cython.nonecheck(True)
    def append_many(self, type, data, *, bookmark=None):
        """Append an event for each item of `data` in one atomic operation, after a bookmark if one
        is given; returns the range of the events' numbers.

        `type` is one type for all, or one for each item. The rest as for `append`.
        """
        items = tuple(data)
        end = self._appender.append(type, items, bookmark, False)
        return range(end - len(items), end)


cdef int wake_early(list wakers) except -1:
    cdef uint64_t cpu = 1 + this_cpu()
    for fd in wakers:
        # A hint: it may fail.
        write(fd, &cpu, 8)
    return 0


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
