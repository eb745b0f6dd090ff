"""The commit lane: whether a commit may begin, its steps, and the end of the stream that it moves.

Owns the one state of a stream that is open for writing, how the end advances (the hashes of the
entries up to it, the bytes of header, record and mark; `records.py` has their layout), and their
restoration if a write fails. What needs a decision is asked of `writer.py`, in `prepare`.
"""

cimport cython
from cpython.buffer cimport PyBUF_WRITABLE, PyBuffer_Release, PyObject_GetBuffer
from cpython.bytes cimport PyBytes_CheckExact, PyBytes_FromStringAndSize
from cpython.object cimport PyObject
from cpython.ref cimport Py_INCREF
from libc.stdint cimport int64_t, uint8_t, uint64_t
from libc.string cimport memcpy
from posix.unistd cimport write

from datastreamer._entry cimport HEADER_PAGE_SIZE, put_u64
from datastreamer._packer cimport (
    Packed, add_event, add_mark, begin_operation, copied, pack_operation,
)
from datastreamer.storage.bookmarks._pairs cimport ReportedBookmarks
from datastreamer.storage.disk._commit cimport (
    Descriptor, Span, coarse_ns, descriptor_of, now_ns, write_packed,
)
from datastreamer.storage.header._heads cimport entries_of, length_of
from datastreamer.storage.pages._page_sums cimport PageSums
from datastreamer.storage.pages._xxh3 cimport xxh3_of_33_to_96
from datastreamer.storage.read._head cimport HeadCell

from datastreamer.errors import NoOperation, OperationOpen
from datastreamer.metrics import writer_numbers
from datastreamer.metrics.names import TIME_BOUNDS_NS
from datastreamer.storage.disk._commit import EntriesNotWritten
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

cdef enum State:
    READY           # a commit that ends at or before `limit` needs no check
    CHECK           # a question is open: room, path, truncated bytes, policy
    WRITING         # a commit runs
    CHANGING        # a sync or a change of committed entries runs
    IN_DOUBT        # a header or sync failed; can be repaired while the file is open
    INTERRUPTED     # only another open can find out what was written
    CLOSED

cdef tuple STATES = ("ready", "check", "writing", "changing", "in doubt", "interrupted", "closed")

cdef enum Kind:
    SYNCED          # on disk before it is visible, and when the call returns
    LATER           # visible at once, on disk later
    HIDDEN          # visible when it is on disk, later

cdef str INTERRUPTION = (
    "a commit or change was interrupted (by Ctrl-C, for example), and may be in the file; open "
    "the stream again to go on"
)

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
    the hashes up to these. `commits` is the number of commits, `durable` the number of those known
    to be on disk, `failures` that of headers and syncs that failed. `waits` is true if the sync
    policy is "commit". A commit without a sync that ends after `sync_at` requests one; -1: each
    does. `failure` says why nothing more is written. `sequence` is that of the newest synced header
    in the page. For one thread at a time, which holds the owner's lock.
    """

    cdef public object written
    cdef public object base
    cdef public object mid
    cdef public object base_sum
    cdef public object mid_sum
    cdef public PageSums sums
    cdef State _state
    cdef readonly int64_t limit
    cdef readonly str failure
    cdef public int64_t failures
    cdef public bint waits
    cdef public int64_t sync_at
    cdef public int64_t commits
    cdef public int64_t durable
    cdef public uint64_t sequence
    # When a commit next has to check the file's path first, by the coarse clock.
    cdef uint64_t _path_check_at
    cdef object _file
    cdef object _owner
    # When the last commit ended, in ns.
    cdef uint64_t _ended
    # Of the owner: its reader's cell, its lock's methods, and its lists.
    cdef HeadCell _cell
    cdef object _acquire, _release, _acquire_sync, _release_sync
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
        self._state = CHECK
        self.limit = self.sync_at = -1
        self.written = head
        self.sums = sums
        self.all_on_disk(head)

    def belong_to(self, owner):
        """Commit with the locks of the `OwnedFile` `owner`, move its head, and wake those that it
        lists. Call it again when it has another reader; locks and lists stay."""
        self._owner = owner
        self._acquire_sync, self._release_sync = owner.syncing.acquire, owner.syncing.release
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
    def path_check_due(self):
        """Whether the writer has to check where the file's path leads before the next commit."""
        return coarse_ns() >= self._path_check_at

    def path_check_begun(self):
        """The time at which a check begins, for `path_checked`."""
        return coarse_ns()

    def path_checked(self, uint64_t began, double seconds):
        """A check that began then found the file at its path: `path_check_due` is false for `seconds`
        from then on."""
        self._path_check_at = began + <uint64_t>(seconds * 1e9)

    def path_check_needed(self):
        """Make `path_check_due` true."""
        self._path_check_at = 0

    # The state.

    @property
    def state(self):
        """"ready", "check", "writing", "changing", "in doubt", "interrupted" or "closed"."""
        return STATES[<int>self._state]

    @property
    def failed(self):
        """Whether nothing more is written until a repair or another open."""
        return self._state == IN_DOUBT or self._state == INTERRUPTED

    @property
    def repairable(self):
        """Whether a repair is possible while the file is open."""
        return self._state == IN_DOUBT

    @property
    def interrupted(self):
        """Whether only another open can find out what was written."""
        return self._state == INTERRUPTED

    def admit(self, int64_t limit):
        """Commits that end at or before offset `limit` need no check."""
        if self._state == READY or self._state == CHECK:
            self.limit, self._state = limit, READY

    def revoke(self):
        """The next commit has to check."""
        self.limit = -1
        if self._state == READY:
            self._state = CHECK

    cdef void _go_on(self) noexcept:
        self._state = CHECK if self.limit < 0 else READY

    def changing(self, work):
        """`work()`, in the state CHANGING. If it raises, the stream is interrupted, unless `work`
        has called `unchanged`, `interrupt` or `doubt`. Raises `OperationOpen` within a commit."""
        if self._state == CHANGING:
            return work()
        self._ensure_idle()
        self._state = CHANGING
        try:
            result = work()
        except BaseException:
            if self._state == CHANGING:
                self.interrupt()
            raise
        if self._state == CHANGING:
            self._go_on()
        return result

    def unchanged(self):
        """The change that runs has changed nothing."""
        if self._state == CHANGING:
            self._go_on()

    cdef int _ensure_idle(self) except -1:
        """Raises `OperationOpen` within a commit or change, which holds the lock."""
        if self._state == WRITING or self._state == CHANGING:
            raise OperationOpen("a commit or change of this thread runs")
        return 0

    def doubt(self, str failure):
        """A header or sync failed."""
        self.limit, self.failure, self._state = -1, failure, IN_DOUBT

    def repaired(self):
        """What was in doubt is settled."""
        self.failure = None
        if self._state == IN_DOUBT:
            self._state = CHECK

    cpdef interrupt(self, str failure=INTERRUPTION):
        """Only another open can find out what was written, because of `failure`."""
        self.limit, self.failure, self._state = -1, failure, INTERRUPTED

    def close(self):
        """No commit begins any more. What is in doubt or interrupted stays so."""
        self.limit = -1
        if not self.failed:
            self._state = CLOSED

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
        (None: no part was). Readers may read up to `seen` (None: to the new end). Leaves the state
        WRITING, which the caller ends. Raises as `Descriptor.commit`, with page and end unchanged.
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
    """The operation of a stream, and the way of each commit.

    `lease`: only its holder may begin operations; while there is one, no entries are changed.
    `commit_guard` is called before each commit, which is not written if it raises. `start` is where
    the operation begins, and `failures` how many syncs had failed by then. `placed` are the hashes
    up to the end of what was written before the commit (None: nothing was).
    """

    cdef public object lease
    cdef public object commit_guard
    cdef readonly object start
    cdef public int64_t failures
    cdef public PageSums placed
    cdef Packed _packer
    # None for a stream that is open for reading.
    cdef object _writer
    cdef StreamEnd _end
    cdef object _deferred
    cdef object _keeper
    cdef ReportedBookmarks _recent

    def __init__(self, packer, writer, deferred):
        """`packer` is the `AtomicOp`, `deferred` the `PendingBookmarks`."""
        self._packer = packer
        self._writer, self._deferred = writer, deferred
        if writer is not None:
            self._end, self._keeper = writer.end, deferred.keeper
            self._recent = self._keeper.recent

    cdef inline bint _may_begin(self, lease) noexcept:
        """Whether an operation may begin, as far as is known without a lock: no other thread runs
        Python code between this and the begin."""
        return (self._end is not None and self.lease is lease and not self._packer._open
                and self._end._state <= CHECK)

    cdef int _enter(self, bint syncing) except -1:
        """Acquire the lock, and before it `syncing` if that is wanted."""
        if syncing:
            self._end._acquire_sync()
        try:
            self._end._acquire()
        except BaseException:
            if syncing:
                self._end._release_sync()
            raise
        return 0

    cdef int _leave(self, bint syncing) except -1:
        try:
            self._end._release()
        finally:
            if syncing:
                self._end._release_sync()
        return 0

    cpdef begin(self, lease=None):
        """Open an operation. Raises as `DataStream.start_atomic_op`."""
        cdef StreamEnd end = self._end
        if not self._may_begin(lease) or end._state != READY:
            self._packer.ensure_startable(lease)
            if not self._may_begin(lease):
                # Another thread has begun one, lent or closed the stream meanwhile.
                self._packer.ensure_startable(lease)
                raise OperationOpen("an operation of another thread has begun")
        # First: after a sync that fails from now on, the commit checks again.
        self.failures = end.failures
        self.placed = None
        self.start = end.written
        begin_operation(self._packer, length_of(self.start), entries_of(self.start))
        if self.lease is not lease:
            # Another thread lent the stream in between; `lend` checks for an operation.
            self._packer._open = False
            raise self._packer.lent("operation")

    cdef append(self, type, tuple items, bookmark, bint single):
        """Append a bookmark (None: without) and an event for each item in an operation; returns
        the number after it. `single`: one event, whose type is a number."""
        cdef Packed packer = self._packer
        cdef StreamEnd end = self._end
        cdef bint syncing, large = False
        while True:
            if not self._may_begin(None) or end._state != READY:
                packer.ensure_startable(None)
            if self.commit_guard is not None:
                self.commit_guard()
            syncing = large or end.waits
            self._enter(syncing)
            try:
                if not self._may_begin(None) or (end.waits and not syncing):
                    continue
                if large:
                    return packer.append_in_parts(type, items, bookmark, single)
                self.failures, self.placed, self.start = end.failures, None, end.written
                if not pack_operation(packer, length_of(self.start), entries_of(self.start), type,
                                      items, bookmark):
                    # Its parts are written before the commit, which may need a sync.
                    large = True
                    continue
                if self.lease is not None:
                    packer._open = False
                    continue
                try:
                    head = self._commit(True, syncing)
                except BaseException as error:
                    if end._state == INTERRUPTED or not isinstance(error, Exception):
                        packer._open = False
                    if isinstance(error, Exception):
                        packer._roll_back_after(error)
                    raise
                return entries_of(head)
            finally:
                self._leave(syncing)

    cpdef commit(self, bint wait=True):
        """Make the open operation part of the stream. Raises as `DataStream.commit_atomic_op`."""
        cdef Packed packer = self._packer
        cdef StreamEnd end = self._end
        cdef bint syncing, again
        if end is None or not packer._open or end._state == CLOSED:
            packer.refuse_without_operation()
        if self.commit_guard is not None:
            self.commit_guard()
        if end.failures != self.failures:
            packer.ensure_repeatable()
        syncing = wait and end.waits
        while True:
            self._enter(syncing)
            try:
                if not packer._open:
                    raise NoOperation("no atomic operation is open: another thread has ended it")
                again = False
                if packer._number == <uint64_t>entries_of(self.start):
                    packer._open = False
                else:
                    again = self._commit(wait, syncing) is None
                if not again:
                    return None if wait else self._writer.pending()
            finally:
                self._leave(syncing)
            syncing = True

    cdef object _commit(self, bint wait, bint syncing):
        """Commit what is packed, and close the operation; returns the new end. Requires the lock;
        None, with nothing done, if it needs `syncing`, too."""
        cdef Packed packed = self._packer
        cdef StreamEnd end = self._end
        cdef bint prepared = False, settles
        cdef Kind kind = LATER if not end.waits else SYNCED if wait else HIDDEN
        end._ensure_idle()
        if kind == SYNCED and not syncing:
            return None
        if (end._state != READY or packed._offset > end.limit or self.placed is not None
                or coarse_ns() >= end._path_check_at):
            if not self._writer.prepare(packed, self, syncing):
                return None
            prepared = True
        # Earlier commits that become durable with it have to be reported.
        settles = kind == SYNCED and end.base is not end.written
        start = entries_of(end.written)
        try:
            try:
                if kind == HIDDEN:
                    head = end.commit(packed, self.placed, end._cell.now.head, False, ())
                else:
                    head = end.commit(packed, self.placed, None, kind == SYNCED, end._wakers)
            except EntriesNotWritten as error:
                end._go_on()
                self._writer.not_committed(error)
            except OSError as error:
                self._writer.not_committed(error)
            if end.sums._finished:
                self._writer.pages_finished()  # first: a reader looks for the records
            if kind != HIDDEN:
                end._cell.publish(head)
            if prepared:
                self._writer.uncommitted.committed()
            if settles:
                self._writer.durability.announce()
            if kind != SYNCED and packed._offset > end.sync_at:
                self._writer.durability.request_sync()
            if kind == HIDDEN:
                self._deferred.add(packed._bookmarks, start, head)
            else:
                if end._inside_wakers:
                    end._owner.wake_inside()
                if self._recent.report(packed._bookmarks, start, head, end.base):
                    self._keeper.wake()
        except BaseException as error:
            if end._state == WRITING:
                end.interrupt()
            if isinstance(error, Exception) and end._state == INTERRUPTED:
                packed._open = False
            raise
        packed._open = False
        end._go_on()
        return head


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
        if not PyBytes_CheckExact(data):
            data = copied(data)
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

    @cython.nonecheck(True)
    def start_atomic_op(self, *, lease=None):
        """Open an operation. Raises `OperationOpen` if one is open, and `LeaseHeld` if another
        holds the lease."""
        self._appender.begin(lease)

    @cython.nonecheck(True)
    def add_entry(self, type, data):
        """Add an event to the open operation; returns its number.

        `type` is any u32 but 0xb0, `data` at most 1,048,559 bytes. Raises `NoOperation`,
        `BadEntryType`, `EntryTooLarge`; the operation continues without the entry.
        """
        try:
            return add_event(self._appender._packer, type, data)
        except NoOperation:
            self._ensure_open()
            raise

    @cython.nonecheck(True)
    def add_bookmark(self, key):
        """Add a bookmark of 1 to 16 bytes to the open operation; returns its entry number."""
        try:
            return add_mark(self._appender._packer, key)
        except NoOperation:
            self._ensure_open()
            raise

    @cython.nonecheck(True)
    def commit_atomic_op(self, *, bint wait=True):
        """Make the operation part of the stream.

        Under the sync policy "commit" it is on disk when this returns. With ``wait=False``
        this returns a `PendingCommit` at once under any policy; under "commit" the operation is
        not visible until it is on disk. Operations that do not wait share their syncs.

        Raises `NoOperation`; `WriteFailed` if the disk refused, `CommitInDoubt` if a header or a
        sync failed, and `FileReplaced` if the stream's path does not lead to the open file any
        more: the operation is still open then; try again, or roll back. Raises `EntriesLost` if
        a failed sync lost entries before it.
        """
        return self._appender.commit(wait)


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
