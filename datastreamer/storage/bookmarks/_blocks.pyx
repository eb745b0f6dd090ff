"""Blocks of sorted bookmarks with a checksum, which the index stores.

A block holds every bookmark of its range, and its checksum covers the range. So one block proves
whether the index has a key, and damage to the block, or to the tree that led to it, is detected:
the checksum does not match, or the range is not the key's. Owns the bytes of a block. Knows no
database; `lmdb.py` stores blocks.

A place is 25 bytes whose order as bytes is that of the pairs: the key filled up with zeros to
16 bytes, its size, the number as big-endian u64. A block is

    u64         xxh3 of the bytes after it
    u8[25]      the place before its range
    u8[25]      the last place of its range, under which it is stored
    then for each pair, in order: u8 size of the key, the key, u64 number (big-endian)

The blocks of an index have no gaps between their ranges: the first begins at `FIRST`, below
every pair, the last ends at `LAST`, above every pair.
"""

cimport cython
from cpython.buffer cimport PyBUF_READ, PyBUF_SIMPLE, PyBuffer_Release, PyObject_GetBuffer
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from cpython.memoryview cimport PyMemoryView_FromMemory
from libc.stdint cimport uint8_t, uint64_t
from libc.stdlib cimport free, malloc
from libc.string cimport memcmp, memcpy, memset

from datastreamer._entry cimport MAX_BOOKMARK_SIZE, get_u64, put_u64
from datastreamer.storage.bookmarks._pairs cimport ORDER_SIZE, SORTED_SIZE, Merged, Pair
from datastreamer.storage.pages._xxh3 cimport xxh3_of_over_240

from xxhash import xxh3_64_intdigest

cdef hash_of = xxh3_64_intdigest

cdef enum:
    BEFORE = 8
    UPTO = BEFORE + SORTED_SIZE
    PAIRS = UPTO + SORTED_SIZE
    # Three blocks fill a page of LMDB: 4,080 bytes, and each block needs its place and 10 bytes.
    MOST_BYTES = 1324
    LEAST_PAIR = 1 + 1 + 8
    MOST_PAIRS = (MOST_BYTES - PAIRS) // LEAST_PAIR
    # Pairs between two calls of `pace`.
    STEP = 4096

PLACE_SIZE = SORTED_SIZE
PAIR_SIZE = sizeof(Pair)
FIRST = bytes(SORTED_SIZE)
LAST = b"\xff" * SORTED_SIZE


class DamagedBlockError(Exception):
    """A block is not what was written, or belongs to another range."""


class MissingBlockError(DamagedBlockError):
    """There is no block for a place."""


cdef inline Py_ssize_t packed_size(const Pair* pair) noexcept nogil:
    return 1 + pair.size + 8


cdef bytes newest_place(bytes key):
    """The place after all pairs with this key of 1 to 16 bytes."""
    cdef uint8_t[SORTED_SIZE] place
    if not 1 <= PyBytes_GET_SIZE(key) <= MAX_BOOKMARK_SIZE:
        raise ValueError(f"a bookmark is 1 to {MAX_BOOKMARK_SIZE} bytes, not {len(key)}")
    memset(place, 0, ORDER_SIZE)
    memcpy(place, PyBytes_AS_STRING(key), PyBytes_GET_SIZE(key))
    place[MAX_BOOKMARK_SIZE] = <uint8_t>PyBytes_GET_SIZE(key)
    memset(place + ORDER_SIZE, 0xFF, 8)
    return PyBytes_FromStringAndSize(<const char*>place, SORTED_SIZE)


def place_at(bytes run not None, Py_ssize_t at):
    """The place of pair `at` of a run (`Pairs.sorted`)."""
    return PyBytes_FromStringAndSize(<const char*>pair_at(run, at), SORTED_SIZE)


cdef const Pair* pair_at(bytes run, Py_ssize_t at) except NULL:
    if not 0 <= at < PyBytes_GET_SIZE(run) // <Py_ssize_t>sizeof(Pair):
        raise IndexError(f"a run of {PyBytes_GET_SIZE(run)} bytes has no pair {at}")
    return <const Pair*>PyBytes_AS_STRING(run) + at


cdef uint64_t sum_of(const uint8_t* block, Py_ssize_t size) except? 0:
    """The checksum of a block of `size` bytes."""
    if size - BEFORE > 240:
        return xxh3_of_over_240(block + BEFORE, size - BEFORE)
    return hash_of(PyMemoryView_FromMemory(<char*>block + BEFORE, size - BEFORE, PyBUF_READ))


cdef int check_size(Py_ssize_t size) except -1:
    # In a damaged tree a block may be memory of any size.
    if not PAIRS <= size <= MOST_BYTES:
        raise DamagedBlockError(f"a block of {size} bytes")
    return 0


cdef int check_block(const uint8_t* block, Py_ssize_t size) except -1:
    if get_u64(block) != sum_of(block, size):
        raise DamagedBlockError("the checksum of a block does not match")
    return 0


cdef int check_block_at(const uint8_t* block, Py_ssize_t size, const void* place) except -1:
    check_block(block, size)
    if (memcmp(block + BEFORE, place, SORTED_SIZE) >= 0
            or memcmp(block + UPTO, place, SORTED_SIZE) < 0):
        raise DamagedBlockError("a block belongs to another range")
    return 0


@cython.final
cdef class _BlockView:
    """A block's memory while it is read; checks that its size is possible."""

    cdef Py_buffer view
    cdef bint held
    cdef const uint8_t* base
    cdef const uint8_t* end

    def __cinit__(self, block):
        PyObject_GetBuffer(block, &self.view, PyBUF_SIMPLE)
        self.held = True
        check_size(self.view.len)
        self.base = <const uint8_t*>self.view.buf
        self.end = self.base + self.view.len

    def __dealloc__(self):
        if self.held:
            PyBuffer_Release(&self.view)

    cdef int check(self) except -1:
        return check_block(self.base, self.view.len)

    cdef int check_at(self, const void* place) except -1:
        """As `check`; also checks that `place` is in the block's range."""
        return check_block_at(self.base, self.view.len, place)

    cdef Py_ssize_t unpack(self, Pair* pairs) except -1:
        """Unpack all pairs into an array of `MOST_PAIRS`; returns their number."""
        cdef const uint8_t* p = self.base + PAIRS
        cdef Py_ssize_t count = 0, size
        while p < self.end:
            size = p[0]
            if not 1 <= size <= MAX_BOOKMARK_SIZE or 1 + size + 8 > self.end - p:
                raise DamagedBlockError("a block's pairs do not fit into it")
            memset(&pairs[count], 0, sizeof(Pair))
            memcpy(pairs[count].key, p + 1, size)
            pairs[count].size = <uint8_t>size
            memcpy(pairs[count].number, p + 1 + size, 8)
            p += 1 + size + 8
            count += 1
        return count


cdef class BlockSearch:
    """BlockSearch(cursor): look-ups of keys, for a subclass that has the database.

    `cursor.set_range(place)` moves the cursor to the first block that is stored at or after a
    place, False if there is none; `cursor.value()` returns the block.
    """

    cdef object _set_range
    cdef object _value

    def __init__(self, cursor):
        self._set_range, self._value = cursor.set_range, cursor.value

    def newest(self, bytes key not None):
        """The newest number of `key`, of 1 to 16 bytes; None if the blocks show that there is none
        and `ensure_newest()` returns. After another exception than `ValueError`, what
        `failed(exception)` returns: that of the database, `MissingBlockError` or
        `DamagedBlockError`."""
        cdef bytes place = newest_place(key)
        try:
            while self._set_range(place):
                found = newest_in(self._value(), place)
                if found is None:
                    self.ensure_newest()
                if not isinstance(found, bytes):
                    return found
                place = found
            raise MissingBlockError("a block is missing")
        except Exception as error:
            return self.failed(error)


cdef object newest_in(block, bytes place):
    """The newest number of a key up to `place` in the block that is stored for `place`; None if
    there is none. If the block's range begins among the numbers of that key, returns the place to
    look up next, as bytes."""
    cdef Py_buffer view
    PyObject_GetBuffer(block, &view, PyBUF_SIMPLE)
    try:
        check_size(view.len)
        return newest_of(<const uint8_t*>view.buf, view.len,
                         <const uint8_t*>PyBytes_AS_STRING(place))
    finally:
        PyBuffer_Release(&view)


cdef object newest_of(const uint8_t* block, Py_ssize_t block_size, const uint8_t* wanted):
    cdef const uint8_t* p = block + PAIRS
    cdef const uint8_t* end = block + block_size
    cdef const uint8_t* found = NULL
    cdef Py_ssize_t size = wanted[MAX_BOOKMARK_SIZE], its_size
    cdef int order
    check_block_at(block, block_size, wanted)
    while p < end:
        its_size = p[0]
        if not 1 <= its_size <= MAX_BOOKMARK_SIZE or 1 + its_size + 8 > end - p:
            raise DamagedBlockError("a block's pairs do not fit into it")
        order = memcmp(p + 1, wanted, its_size if its_size < size else size)
        if order == 0 and its_size == size:
            if memcmp(p + 1 + size, wanted + ORDER_SIZE, 8) > 0:
                break
            found = p + 1 + size
        elif order > 0 or (order == 0 and its_size > size):
            break
        p += 1 + its_size + 8
    if found != NULL:
        return get_u64(found)
    if memcmp(block + BEFORE, wanted, ORDER_SIZE) == 0:
        return PyBytes_FromStringAndSize(<const char*>block + BEFORE, SORTED_SIZE)
    return None


def unpacked(block, bytes before not None):
    """The block's pairs as tuples (key, number), and the last place of its range.

    `before` is the place before its range. Raises `DamagedBlockError`.
    """
    cdef _BlockView view = _BlockView(block)
    cdef Pair[MOST_PAIRS] pairs
    cdef Py_ssize_t i, count
    if PyBytes_GET_SIZE(before) != SORTED_SIZE:
        raise ValueError("a place has 25 bytes")
    view.check()
    if memcmp(view.base + BEFORE, PyBytes_AS_STRING(before), SORTED_SIZE) != 0:
        raise DamagedBlockError("a block is missing")
    count = view.unpack(pairs)
    upto = PyBytes_FromStringAndSize(<const char*>view.base + UPTO, SORTED_SIZE)
    return [(PyBytes_FromStringAndSize(<const char*>pairs[i].key, pairs[i].size),
             get_u64(pairs[i].number)) for i in range(count)], upto


cdef bytes finished(bytes block, Py_ssize_t used, const void* before, const void* upto):
    """A block of `used` bytes, which already holds the pairs."""
    cdef uint8_t* base = <uint8_t*>PyBytes_AS_STRING(block)
    memcpy(base + BEFORE, before, SORTED_SIZE)
    memcpy(base + UPTO, upto, SORTED_SIZE)
    put_u64(base, sum_of(base, used))
    return PyBytes_FromStringAndSize(<const char*>base, used)


def empty_block():
    """The block of an index with no bookmarks."""
    return finished(PyBytes_FromStringAndSize(NULL, MOST_BYTES), PAIRS, PyBytes_AS_STRING(FIRST),
                    PyBytes_AS_STRING(LAST))


cdef list packed(const Pair** pairs, Py_ssize_t count, const void* before, const void* upto,
                 Py_ssize_t most):
    """Blocks of at most `most` bytes, as tuples (last place, block), for one range."""
    cdef bytes room = PyBytes_FromStringAndSize(NULL, MOST_BYTES)
    cdef uint8_t* base = <uint8_t*>PyBytes_AS_STRING(room)
    cdef Py_ssize_t used = PAIRS, i, size
    blocks = []
    for i in range(count):
        size = packed_size(pairs[i])
        if used + size > most and used > PAIRS:
            place = PyBytes_FromStringAndSize(<const char*>pairs[i - 1], SORTED_SIZE)
            blocks.append((place, finished(room, used, before, pairs[i - 1])))
            before = pairs[i - 1]
            used = PAIRS
        put_pair(base + used, pairs[i])
        used += size
    place = PyBytes_FromStringAndSize(<const char*>upto, SORTED_SIZE)
    blocks.append((place, finished(room, used, before, upto)))
    return blocks


cdef inline void put_pair(uint8_t* p, const Pair* pair) noexcept nogil:
    p[0] = pair.size
    memcpy(p + 1, pair.key, pair.size)
    memcpy(p + 1 + pair.size, pair.number, 8)


def merged(block, bytes run not None, Py_ssize_t at):
    """Add the pairs of a run, from `at` on, that are in the block's range.

    Returns the blocks that replace it, as tuples (last place, block), and the index of the first
    pair that is in another range. `block` is the one stored for pair `at`. Raises
    `DamagedBlockError`.
    """
    return changed(block, run, at, True)


def without(block, bytes run not None, Py_ssize_t at):
    """As `merged`, but removes these pairs; missing ones are ignored."""
    return changed(block, run, at, False)


cdef tuple changed(block, bytes run, Py_ssize_t at, bint put):
    cdef _BlockView view = _BlockView(block)
    cdef Pair[MOST_PAIRS] old
    cdef const Pair** pairs
    cdef const Pair* new = pair_at(run, at)
    cdef const Pair* end = (<const Pair*>PyBytes_AS_STRING(run)
                            + PyBytes_GET_SIZE(run) // <Py_ssize_t>sizeof(Pair))
    cdef const Pair* last = new
    cdef Py_ssize_t i = 0, count, used = 0, total = 0, parts, most = MOST_BYTES
    cdef bint appended
    cdef int order
    view.check_at(new)
    count = view.unpack(old)
    while last < end and memcmp(last, view.base + UPTO, SORTED_SIZE) <= 0:
        last += 1
    at += last - new
    appended = not count or memcmp(&old[count - 1], new, SORTED_SIZE) < 0
    pairs = <const Pair**>malloc((count + (last - new)) * sizeof(Pair*))
    if pairs == NULL:
        raise MemoryError
    try:
        while i < count or new < last:
            if i == count:
                order = 1
            elif new == last:
                order = -1
            else:
                order = memcmp(&old[i], new, SORTED_SIZE)
            if order <= 0:
                if order or put:
                    pairs[used] = &old[i]
                    used += 1
                i += 1
            elif put and (not used or memcmp(pairs[used - 1], new, SORTED_SIZE) != 0):
                pairs[used] = new
                used += 1
            if order >= 0:
                new += 1
        for i in range(used):
            total += packed_size(pairs[i])
        if not appended and total > MOST_BYTES - PAIRS:
            # The blocks are equally full, so that each has space for later pairs.
            parts = total // (MOST_BYTES - PAIRS - MAX_BOOKMARK_SIZE - 9) + 1
            most = min(MOST_BYTES, PAIRS + total // parts + MAX_BOOKMARK_SIZE + 9)
        return packed(pairs, used, view.base + BEFORE, view.base + UPTO, most), at
    finally:
        free(pairs)


def lacking(block, bytes run not None, Py_ssize_t at):
    """The pairs of a run, from `at` on, that are in the block's range but not in the block, as
    tuples (key, number); and the index of the first pair that is in another range."""
    cdef _BlockView view = _BlockView(block)
    cdef Pair[MOST_PAIRS] pairs
    cdef const Pair* pair = pair_at(run, at)
    cdef const Pair* end = (<const Pair*>PyBytes_AS_STRING(run)
                            + PyBytes_GET_SIZE(run) // <Py_ssize_t>sizeof(Pair))
    cdef Py_ssize_t i = 0, count
    view.check_at(pair)
    count = view.unpack(pairs)
    missing = []
    while pair < end and memcmp(pair, view.base + UPTO, SORTED_SIZE) <= 0:
        while i < count and memcmp(&pairs[i], pair, SORTED_SIZE) < 0:
            i += 1
        if i == count or memcmp(&pairs[i], pair, SORTED_SIZE) != 0:
            missing.append((PyBytes_FromStringAndSize(<const char*>pair.key, pair.size),
                            get_u64(pair.number)))
        pair += 1
        at += 1
    return missing, at


cdef class Blocks:
    """Blocks(runs, pace): iterates over the full blocks of an index that holds these runs, as
    tuples (last place, block) in order.

    Calls `pace()` every few thousand pairs; its exceptions end the iteration.
    """

    cdef Merged _pairs
    cdef object _pace
    cdef bytes _room
    cdef const Pair* _pair     # the next one; NULL at the end
    cdef Pair _last            # of the previous block
    cdef bint _ended
    cdef Py_ssize_t _given

    def __cinit__(self, runs, pace):
        self._pairs = Merged(runs)
        self._pace = pace
        self._room = PyBytes_FromStringAndSize(NULL, MOST_BYTES)
        self._pair = self._pairs.next()
        memset(&self._last, 0, sizeof(Pair))

    def __iter__(self):
        return self

    def __next__(self):
        cdef Pair before = self._last
        cdef uint8_t* base = <uint8_t*>PyBytes_AS_STRING(self._room)
        cdef Py_ssize_t used = PAIRS
        if self._ended:
            raise StopIteration
        if self._given >= STEP:
            self._given = 0
            self._pace()
        while self._pair != NULL and used + packed_size(self._pair) <= MOST_BYTES:
            put_pair(base + used, self._pair)
            used += packed_size(self._pair)
            self._last = self._pair[0]
            self._given += 1
            self._pair = self._pairs.next()
            while self._pair != NULL and memcmp(self._pair, &self._last, SORTED_SIZE) == 0:
                self._pair = self._pairs.next()
        if self._pair == NULL:
            self._ended = True
            return LAST, finished(self._room, used, &before, PyBytes_AS_STRING(LAST))
        place = PyBytes_FromStringAndSize(<const char*>&self._last, SORTED_SIZE)
        return place, finished(self._room, used, &before, &self._last)
