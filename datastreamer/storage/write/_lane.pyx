"""The commit lane: the one state that decides whether a commit may begin, and a commit's steps.

Owns the state of a stream that is open for writing, the order of a commit's steps, and the calls
that begin, pack and commit in C. What needs a decision is asked of `writer.py`, in `prepare`; the
bytes are `_stream_end.pyx`'s.
"""

cimport cython
from libc.stdint cimport int64_t, uint64_t
from posix.unistd cimport write

from datastreamer._packer cimport Packed, add_event, add_mark, begin_operation
from datastreamer.storage.bookmarks._pairs cimport ReportedBookmarks
from datastreamer.storage.disk._commit cimport coarse_ns, now_ns, unix_ms
from datastreamer.storage.header._heads cimport entries_of, length_of
from datastreamer.storage.pages._page_sums cimport PageSums
from datastreamer.storage.read._head cimport HeadCell
from datastreamer.storage.write._stream_end cimport (
    CHANGING, CHECK, CLOSED, IN_DOUBT, INTERRUPTED, READY, WRITING, StreamEnd,
)

from datastreamer.errors import NoOperation, OperationOpen
from datastreamer.storage.write.background import PendingCommit

cdef extern from *:
    """
    #include <stdint.h>
    #if defined(__linux__)
    #include <sched.h>
    static inline uint64_t this_cpu(void) { return (uint64_t)sched_getcpu(); }
    #else
    static inline uint64_t this_cpu(void) { return 0; }
    #endif
    """
    uint64_t this_cpu() noexcept nogil

cdef enum:
    # A thread that has waited this long for a commit is assumed to be asleep.
    PAUSE_NS = 100_000
    # The write of a longer operation takes longer than the thread takes to wake.
    MOST_EARLY = 64 * 1024

cdef tuple STATES = ("ready", "check", "writing", "changing", "in doubt", "interrupted", "closed")

cdef enum Kind:
    SYNCED          # on disk before it is visible, and when the call returns
    LATER           # visible at once, on disk later
    HIDDEN          # visible when it is on disk, later

cdef str INTERRUPTION = (
    "a commit or change was interrupted (by Ctrl-C, for example), and may be in the file; open "
    "the stream again to go on"
)


@cython.final
@cython.no_gc_clear  # as `StreamEnd`
cdef class CommitLane(StreamEnd):
    """The state of a stream that is open for writing, whose end it moves.

    A commit that ends at or before offset `limit` needs no check. `failures` is the number of
    headers and syncs that failed; `failure` says why nothing more is written. `waits` is true if
    the sync policy is "commit". A commit without a sync that ends after `sync_at` requests one;
    -1: each does. From `path_check_at` on, by `coarse_time`, a commit has to check the file's path
    first. From `mark_at` on, in Unix ms, its time is noted; `latest_ms` is the latest time of one.
    For one thread at a time, which holds the owner's lock.
    """

    cdef readonly int64_t limit
    cdef readonly str failure
    cdef public int64_t failures
    cdef public bint waits
    cdef public int64_t sync_at
    cdef public uint64_t path_check_at
    cdef public uint64_t mark_at, latest_ms
    cdef object _owner
    # Of the owner: its reader's cell, its lock's methods, and its lists.
    cdef HeadCell _cell
    cdef object _acquire, _release
    cdef list _wakers, _inside_wakers, _early_wakers

    def __cinit__(self):
        self._state = CHECK
        self.limit = self.sync_at = -1

    def belong_to(self, owner):
        """Commit with the locks of the `OwnedFile` `owner`, move its head, and wake those that it
        lists. Call it again when it has another reader; locks and lists stay."""
        self._owner = owner
        self._cell = owner.reader.cell
        self._acquire, self._release = owner.lock.acquire, owner.lock.release
        self._wakers, self._inside_wakers = owner.wakers, owner.inside_wakers
        self._early_wakers = owner.early_wakers

    def coarse_time(self):
        """The time on the clock of `path_check_at`, in ns: cheap, and some ms late at most."""
        return coarse_ns()

    # The state.

    @property
    def state(self):
        """"ready", "check", "writing", "changing", "in doubt", "interrupted" or "closed"."""
        return STATES[<int>self._state]

    def admit(self, int64_t limit):
        """Commits that end at or before offset `limit` need no check."""
        if self._state == READY or self._state == CHECK:
            self.limit, self._state = limit, READY

    def revoke(self):
        """The next commit has to check."""
        self.limit = -1
        if self._state == READY:
            self._state = CHECK

    def changing(self, work):
        """Call `work` in the state CHANGING. If it raises, the stream is interrupted, unless `work`
        has called `ended`, `interrupt` or `doubt`. Raises `OperationOpen` within a commit."""
        if self._state == CHANGING:
            work()
            return
        self._ensure_idle()
        self._state = CHANGING
        try:
            work()
        except BaseException:
            if self._state == CHANGING:
                self.interrupt()
            raise
        self.ended()

    cpdef ended(self):
        """The commit or change that runs has ended, or has changed nothing."""
        if self._state == WRITING or self._state == CHANGING:
            self._state = CHECK if self.limit < 0 else READY

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
        if self._state != IN_DOUBT and self._state != INTERRUPTED:
            self._state = CLOSED


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
    cdef CommitLane _lane
    cdef object _deferred
    cdef object _keeper
    cdef ReportedBookmarks _recent

    def __init__(self, packer, writer, deferred):
        """`packer` is the `AtomicOp`, `deferred` the `PendingBookmarks`."""
        self._packer = packer
        self._writer, self._deferred = writer, deferred
        if writer is not None:
            self._lane, self._keeper = writer.end, deferred.keeper
            self._recent = self._keeper.recent

    cdef inline bint _may_begin(self, lease) noexcept:
        """Whether an operation may begin, as far as is known without a lock: no other thread runs
        Python code between this and the begin."""
        return (self._lane is not None and self.lease is lease and not self._packer._open
                and self._lane._state <= CHECK)

    cdef int _enter(self, bint syncing) except -1:
        """Acquire the lock, and before it `syncing` if that is wanted."""
        if syncing:
            self._lane._owner.syncing.acquire()
        try:
            self._lane._acquire()
        except BaseException:
            if syncing:
                self._lane._owner.syncing.release()
            raise
        return 0

    cdef int _leave(self, bint syncing) except -1:
        self._lane._release()
        if syncing:
            self._lane._owner.syncing.release()
        return 0

    cpdef begin(self, lease=None):
        """Open an operation. Raises as `DataStream.start_atomic_op`."""
        if not self._may_begin(lease) or self._lane._state != READY:
            self._packer.ensure_startable(lease)
            if not self._may_begin(lease):
                # Another thread has begun one, lent or closed the stream meanwhile.
                self._packer.ensure_startable(lease)
                raise OperationOpen("an operation of another thread has begun")
        self._begin(lease)

    cdef int _begin(self, lease) except -1:
        """Open an operation, if `_may_begin`."""
        # First: after a sync that fails from now on, the commit checks again.
        self.failures = self._lane.failures
        self.placed = None
        self.start = self._lane.written
        begin_operation(self._packer, length_of(self.start), entries_of(self.start))
        if self.lease is not lease:
            # Another thread lent the stream in between; `lend` checks for an operation.
            self._packer._open = False
            raise self._packer.lent("operation")
        return 0

    cdef append(self, type, data, bookmark, bint single):
        """Append a bookmark (None: without) and an event, or (not `single`) an event for each item
        of a tuple, in an operation; returns the number after it."""
        cdef Packed packer = self._packer
        cdef CommitLane lane = self._lane
        cdef bint syncing, was_open
        while True:
            if not self._may_begin(None) or lane._state != READY:
                packer.ensure_startable(None)
            if self.commit_guard is not None:
                self.commit_guard()
            syncing = lane.waits
            self._enter(syncing)
            try:
                lane._ensure_idle()
                if not self._may_begin(None) or (lane.waits and not syncing):
                    continue
                self._begin(None)
                try:
                    if bookmark is not None:
                        add_mark(packer, bookmark)
                    if single:
                        add_event(packer, type, data)
                    else:
                        packer.add_entries(type, data)
                    return entries_of(self._commit(True, syncing))
                except BaseException as error:
                    failure = error
                    was_open = packer._open and isinstance(error, Exception)
                    packer._open = False
            finally:
                self._leave(syncing)
            if was_open:
                # Without the lock: it may need `syncing`, which is acquired before it.
                packer.rolled_back_after(failure)
            raise failure

    cpdef commit(self, bint wait=True):
        """Make the open operation part of the stream. Raises as `DataStream.commit_atomic_op`."""
        cdef Packed packer = self._packer
        cdef CommitLane lane = self._lane
        cdef bint syncing
        if lane is None or not packer._open or lane._state == CLOSED:
            packer.refuse_without_operation()
        if self.commit_guard is not None:
            self.commit_guard()
        if lane._state == IN_DOUBT:
            packer.recover()
        syncing = wait and lane.waits
        while True:
            self._enter(syncing)
            try:
                if not packer._open:
                    raise NoOperation("no atomic operation is open: another thread has ended it")
                if self._commit(wait, syncing) is not None:
                    return None if wait else PendingCommit(self._writer.durability, lane.commits)
            finally:
                self._leave(syncing)
            syncing = True

    cdef object _commit(self, bint wait, bint syncing):
        """Commit what is packed, and close the operation; returns the new end. Requires the lock;
        None, with nothing done, if it needs `syncing`, too."""
        cdef Packed packed = self._packer
        cdef CommitLane lane = self._lane
        cdef bint prepared = False, settles
        cdef uint64_t now
        cdef Kind kind = LATER if not lane.waits else SYNCED if wait else HIDDEN
        lane._ensure_idle()
        if packed._number == <uint64_t>entries_of(self.start):
            packed._open = False
            return self.start
        if kind == SYNCED and not syncing:
            return None
        if (lane._state != READY or packed._offset > lane.limit or self.placed is not None
                or coarse_ns() >= lane.path_check_at):
            if not self._writer.prepare(packed, self, syncing):
                return None
            prepared = True
        # Earlier commits that become durable with it have to be reported.
        settles = kind == SYNCED and lane.base is not lane.written
        start = entries_of(lane.written)
        if (kind == LATER and lane._early_wakers and now_ns() - lane._ended > PAUSE_NS
                and packed._offset - length_of(lane.written) <= MOST_EARLY):
            wake_early(lane._early_wakers)
        try:
            try:
                if kind == HIDDEN:
                    head = lane.commit(packed, self.placed, lane._cell.now.head, False, ())
                else:
                    head = lane.commit(packed, self.placed, None, kind == SYNCED, lane._wakers)
            except OSError as error:
                self._writer.not_committed(error)
            now = unix_ms()
            if lane.sums._finished or now >= lane.mark_at:
                if lane.sums._finished:
                    # First: a reader looks for the records.
                    lane._owner.sums.finished(lane.sums._finished)
                lane.mark_at = lane._owner.summaries.committed(start, lane.sums._finished)
                lane.sums._finished.clear()
            elif now > lane.latest_ms:
                lane.latest_ms = now
            if kind != HIDDEN:
                lane._cell.publish(head)
            if prepared:
                self._writer.uncommitted.committed()
            if settles:
                self._writer.durability.announce()
            if kind != SYNCED and packed._offset > lane.sync_at:
                self._writer.durability.request_sync()
            if kind == HIDDEN:
                self._deferred.add(packed._bookmarks, start, head)
            else:
                if lane._inside_wakers:
                    lane._owner.wake_inside()
                if self._recent.report(packed._bookmarks, start, head, lane.base):
                    self._keeper.wake()
        except BaseException as error:
            if lane._state == WRITING:
                lane.interrupt()
            if isinstance(error, Exception) and lane._state == INTERRUPTED:
                packed._open = False
            raise
        packed._open = False
        lane.ended()
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
        return self._appender.append(type, data, bookmark, True) - 1

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
        return add_event(self._appender._packer, type, data)

    @cython.nonecheck(True)
    def add_bookmark(self, key):
        """Add a bookmark of 1 to 16 bytes to the open operation; returns its entry number."""
        return add_mark(self._appender._packer, key)

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
