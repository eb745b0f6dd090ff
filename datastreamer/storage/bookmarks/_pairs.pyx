"""Bookmarks in bulk: many pairs of key and entry number without a Python object each.

Owns the list of pairs that wait to be indexed, and its order, and the fields that a writer's report
of a commit changes; `recent.py` has what else is done with these. Knows batches of entries; must not
know files, indexes or threads. A pair takes 32 bytes. The GIL protects the data from other threads;
code that releases it works on a private copy.
"""

cimport cython
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from cpython.buffer cimport PyBUF_SIMPLE, PyBuffer_Release, PyObject_GetBuffer
from cpython.object cimport PyObject
from libc.stdint cimport uint8_t, uint32_t, uint64_t
from libc.stdlib cimport free, malloc, realloc
from libc.string cimport memcmp, memcpy, memmove, memset

from datastreamer._codec cimport BatchColumns, columns_of
from datastreamer._entry cimport HEAD_SIZE, MAX_BOOKMARK_SIZE, TYPE_BOOKMARK, get_u64, put_u64
from datastreamer.storage.header._heads cimport entries_of

cdef void put_in_order(Pair* pairs, Pair* room, Py_ssize_t count) noexcept nogil:
    """Sort `pairs` by key; pairs of one key keep their order.

    A radix sort from the last byte to the first. It skips bytes in which no two pairs differ: real
    keys use few of the 16.
    """
    cdef Py_ssize_t places[ORDER_SIZE][256]
    cdef Py_ssize_t i, at, held, sum_
    cdef int place, value
    cdef Pair* source = pairs
    cdef Pair* target = room
    cdef uint8_t* order
    if count < 2:
        return
    memset(places, 0, sizeof(places))
    for i in range(count):
        order = pairs[i].key
        for place in range(ORDER_SIZE):
            places[place][order[place]] += 1
    for place in range(ORDER_SIZE - 1, -1, -1):
        if places[place][source[0].key[place]] == count:
            continue
        sum_ = 0
        for value in range(256):
            held = places[place][value]
            places[place][value] = sum_
            sum_ += held
        for i in range(count):
            value = source[i].key[place]
            at = places[place][value]
            places[place][value] = at + 1
            target[at] = source[i]
        source, target = target, source
    if source != pairs:
        memcpy(pairs, source, count * sizeof(Pair))


@cython.final
cdef class Pairs:
    """A list of (key, entry number) in ascending order of the numbers; keys of 1 to 16 bytes.

    An iteration yields tuples; it may or may not see what is added or removed meanwhile.
    """

    def __init__(self, pairs=()):
        self.extend(pairs)

    def __dealloc__(self):
        free(self._pairs)

    def __len__(self):
        return self._count

    def __iter__(self):
        cdef _Tuples tuples = _Tuples.__new__(_Tuples)
        tuples.pairs = self
        return tuples

    def extend(self, pairs):
        """Add tuples (key, number), or another `Pairs`."""
        cdef Pairs other
        cdef bytes key
        if isinstance(pairs, Pairs):
            other = <Pairs>pairs
            self._reserve(other._count)
            memcpy(self._pairs + self._count, other._pairs, other._count * sizeof(Pair))
            self._count += other._count
            return
        for key, number in pairs:
            if not 1 <= PyBytes_GET_SIZE(key) <= MAX_BOOKMARK_SIZE:
                raise ValueError(f"a bookmark is 1 to {MAX_BOOKMARK_SIZE} bytes, not {len(key)}")
            self._reserve(1)
            self._put(<const uint8_t*>PyBytes_AS_STRING(key), PyBytes_GET_SIZE(key), number)

    def take(self, batch):
        """Add the bookmarks of a batch that can be looked up, with keys of 1 to 16 bytes."""
        cdef BatchColumns columns
        cdef Py_ssize_t i, found = 0
        cdef uint64_t number = batch.first_number
        columns_of(batch, &columns)
        with nogil:
            for i in range(columns.count):
                found += columns.types[i] == TYPE_BOOKMARK
        if not found:
            return
        self._reserve(found)
        for i in range(columns.count):
            if columns.types[i] == TYPE_BOOKMARK and 1 <= columns.lengths[i] <= MAX_BOOKMARK_SIZE:
                self._put(columns.base + columns.offsets[i] + HEAD_SIZE, columns.lengths[i],
                          number + <uint64_t>i)

    def before(self, number):
        """A copy of those with smaller numbers."""
        return self._copy(0, self._place(number))

    def drop_before(self, number):
        """Forget those with smaller numbers."""
        cdef Py_ssize_t start = self._place(number)
        self._count -= start
        memmove(self._pairs, self._pairs + start, self._count * sizeof(Pair))

    def drop_from(self, number):
        """Forget those with this number or larger ones."""
        self._count = self._place(number)

    def first_number(self):
        """The smallest number. Raises `IndexError` if there are no pairs."""
        if not self._count:
            raise IndexError("there are no pairs")
        return get_u64(self._pairs[0].number)

    def sorted(self):
        """A run for `Merged`: the pairs by key, those of one key by number."""
        cdef bytes run = PyBytes_FromStringAndSize(NULL, self._count * <Py_ssize_t>sizeof(Pair))
        cdef Pair* pairs = <Pair*>PyBytes_AS_STRING(run)
        cdef Pair* room = <Pair*>malloc(self._count * sizeof(Pair) + 1)
        cdef Py_ssize_t count = self._count
        if room == NULL:
            raise MemoryError
        memcpy(pairs, self._pairs, count * sizeof(Pair))
        with nogil:
            put_in_order(pairs, room, count)
            free(room)
        return run

    def newest(self):
        """The last pair of each key, by key: the key's length (u8), 16 bytes key, the number
        (u64)."""
        cdef bytes run = self.sorted()
        cdef bytes packed = PyBytes_FromStringAndSize(NULL, self._count * SORTED_SIZE)
        cdef Pair* pairs = <Pair*>PyBytes_AS_STRING(run)
        cdef uint8_t* to = <uint8_t*>PyBytes_AS_STRING(packed)
        cdef Py_ssize_t i, count = PyBytes_GET_SIZE(run) // <Py_ssize_t>sizeof(Pair), kept = 0
        with nogil:
            for i in range(count):
                if i + 1 < count and not memcmp(pairs[i].key, pairs[i + 1].key, ORDER_SIZE):
                    continue
                to[0] = pairs[i].size
                memcpy(to + 1, pairs[i].key, MAX_BOOKMARK_SIZE)
                memcpy(to + ORDER_SIZE, pairs[i].number, 8)
                to += SORTED_SIZE
                kept += 1
        return packed[:kept * SORTED_SIZE]

    cdef int _reserve(self, Py_ssize_t more) except -1:
        cdef Py_ssize_t capacity
        cdef void* moved
        if more <= self._capacity - self._count:
            return 0
        capacity = max(self._count + more, self._capacity + (self._capacity >> 1), 16)
        moved = realloc(self._pairs, capacity * sizeof(Pair))
        if moved == NULL:
            raise MemoryError
        self._pairs = <Pair*>moved
        self._capacity = capacity
        return 0

    cdef int _put(self, const uint8_t* key, Py_ssize_t size, uint64_t number) except -1:
        cdef Pair* pair = self._pairs + self._count
        memset(pair, 0, sizeof(Pair))
        memcpy(pair.key, key, size)
        pair.size = <uint8_t>size
        put_u64(pair.number, number)
        self._count += 1
        return 0

    cdef Py_ssize_t _place(self, uint64_t number) except -1:
        """The number of pairs with a smaller number."""
        cdef Py_ssize_t low = 0, high = self._count, middle
        while low < high:
            middle = (low + high) >> 1
            if get_u64(self._pairs[middle].number) < number:
                low = middle + 1
            else:
                high = middle
        return low

    cdef Pairs _copy(self, Py_ssize_t start, Py_ssize_t stop):
        cdef Pairs copy = Pairs.__new__(Pairs)
        copy._reserve(stop - start)
        copy._count = stop - start
        memcpy(copy._pairs, self._pairs + start, copy._count * sizeof(Pair))
        return copy


@cython.final
cdef class _Tuples:
    cdef Pairs pairs
    cdef Py_ssize_t at

    def __iter__(self):
        return self

    def __next__(self):
        cdef Pair* pair
        if self.at >= self.pairs._count:
            raise StopIteration
        pair = self.pairs._pairs + self.at
        self.at += 1
        key = PyBytes_FromStringAndSize(<const char*>pair.key, pair.size)
        return key, get_u64(pair.number)


cdef class ReportedBookmarks:
    """The bookmarks of the newest entries, up to `end`.

    `newest` has each key's highest number; a writer's `waiting` has all of them in the order of the
    file, until they are in the index. `synced` is on disk. `unfinished` is true during a
    truncation, and after one that an exception ended: the fields may be wrong then.
    """

    def __init__(self, head, guard, bint for_writer, Py_ssize_t most, Py_ssize_t enough):
        """`guard` is the lock of these fields. Keeps fewer than `most` bookmarks; the index is
        written when `enough` wait."""
        self.end = self.synced = head
        self.newest = {}
        self.waiting = Pairs()
        self._for_writer = for_writer
        self._most, self._enough = most, enough
        self._acquire, self._release = guard.acquire, guard.release

    def committed(self, bookmarks, start, head, synced):
        """An operation was committed: from entry `start` to `head`, with these bookmarks (None: too
        many for memory); `synced` is on disk. Returns whether enough wait to be indexed.

        Acquires the guard if there are bookmarks.
        """
        return self.report(bookmarks, start, head, synced)

    cdef bint report(self, list bookmarks, uint64_t start, head, synced) except -1:
        if bookmarks is not None and not bookmarks:
            if start == <uint64_t>entries_of(self.end) and not self.unfinished:
                self.end = head
            self.synced = synced
            return False
        self._acquire()
        try:
            # (Otherwise a look-up has read them from the file already.)
            if not self.unfinished and start == <uint64_t>entries_of(self.end):
                if bookmarks is None:
                    self.begin_at(head)
                else:
                    self.add(bookmarks, head)
                    self.limit()
            self.synced = synced
            return bookmarks is None or (
                self.waiting._count >= self._enough > 0
                and get_u64(self.waiting._pairs[0].number) < <uint64_t>entries_of(synced))
        finally:
            self._release()

    cpdef add(self, bookmarks, head):
        """Add those of the entries from `end` to `head`."""
        for key, number in bookmarks:
            self.newest[key] = number
        if self._for_writer:
            self.waiting.extend(bookmarks)
        self.end = head

    cpdef limit(self):
        """Forget all bookmarks if they are too many."""
        if len(self.newest) >= self._most or self.waiting._count >= self._most:
            self.clear()

    def begin_at(self, head):
        """Forget everything and continue from `head`."""
        self.end = head
        self.clear()

    def clear(self):
        """Forget the bookmarks before `end`: the file has them. A subclass does more."""
        self.newest = {}
        self.waiting = Pairs()


@cython.final
@cython.no_gc_clear
cdef class _Run:
    """The rest of one run."""

    cdef Py_buffer view
    cdef bint held
    cdef const Pair* next
    cdef const Pair* end

    def __cinit__(self, run):
        PyObject_GetBuffer(run, &self.view, PyBUF_SIMPLE)
        self.held = True
        if self.view.len % <Py_ssize_t>sizeof(Pair):
            raise ValueError(f"{self.view.len} bytes are not a run of pairs")
        self.next = <const Pair*>self.view.buf
        self.end = self.next + self.view.len // <Py_ssize_t>sizeof(Pair)

    def __dealloc__(self):
        if self.held:
            PyBuffer_Release(&self.view)


cdef class Merged:
    """Merged(runs): one run of several, in order.

    `runs` are buffers that `Pairs.sorted` made, or copies of them; `Merged` holds them.
    """

    def __cinit__(self, runs):
        self._runs = [_Run(run) for run in runs]
        self._heap = <PyObject**>malloc((len(self._runs) + 1) * sizeof(PyObject*))
        if self._heap == NULL:
            raise MemoryError
        for run in self._runs:
            if (<_Run>run).next != (<_Run>run).end:
                self._heap[self._count] = <PyObject*>run
                self._count += 1
        cdef Py_ssize_t at
        for at in range(self._count // 2 - 1, -1, -1):
            self._sink(at)

    def __dealloc__(self):
        free(self._heap)

    cdef const Pair* next(self) noexcept:
        """The next pair, in its run's memory; NULL at the end."""
        cdef const Pair* pair
        cdef _Run run
        if self._count == 0:
            return NULL
        run = <_Run>self._heap[0]
        pair = run.next
        run.next += 1
        if run.next == run.end:
            self._count -= 1
            self._heap[0] = self._heap[self._count]
        if self._count > 1:
            self._sink(0)
        return pair

    cdef void _sink(self, Py_ssize_t at) noexcept:
        cdef PyObject* held = self._heap[at]
        cdef const Pair* pair = (<_Run>held).next
        cdef Py_ssize_t child
        while 2 * at + 1 < self._count:
            child = 2 * at + 1
            if child + 1 < self._count and memcmp((<_Run>self._heap[child + 1]).next,
                                                  (<_Run>self._heap[child]).next, SORTED_SIZE) < 0:
                child += 1
            if memcmp((<_Run>self._heap[child]).next, pair, SORTED_SIZE) >= 0:
                break
            self._heap[at] = self._heap[child]
            at = child
        self._heap[at] = held


def newest_in(batch, bytes key not None):
    """The highest number of the batch's entries that are the bookmark `key`; None if there is none.
    """
    cdef BatchColumns columns
    cdef Py_ssize_t i
    cdef uint32_t size = <uint32_t>PyBytes_GET_SIZE(key)
    cdef const char* wanted = PyBytes_AS_STRING(key)
    columns_of(batch, &columns)
    with nogil:
        i = columns.count - 1
        while i >= 0 and not (
            columns.types[i] == TYPE_BOOKMARK and columns.lengths[i] == size
            and memcmp(columns.base + columns.offsets[i] + HEAD_SIZE, wanted, size) == 0
        ):
            i -= 1
    return None if i < 0 else batch.first_number + i
