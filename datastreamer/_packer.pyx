"""The write side of the hot path: the entries of an operation to bytes, page by page.

Owns the arena of packed bytes, the segments, which say where in the file they belong, and the
numbers of new entries. Knows bytes and file offsets; must not know files (a subclass writes),
sockets or clocks. Reads entries only through a batch's columns. Only the GIL protects objects from
other threads.
"""

cimport cython
from cpython.buffer cimport (
    PyBUF_SIMPLE, PyBuffer_FillInfo, PyBuffer_Release, PyObject_GetBuffer,
)
from cpython.bytes cimport (
    PyBytes_AS_STRING, PyBytes_CheckExact, PyBytes_FromStringAndSize, PyBytes_GET_SIZE,
)
from cpython.list cimport PyList_AsTuple, PyList_CheckExact
from cpython.long cimport PyLong_CheckExact
from cpython.memoryview cimport PyMemoryView_FromObject
from cpython.object cimport PyObject
from cpython.pyport cimport PY_SSIZE_T_MAX
from cpython.tuple cimport PyTuple_CheckExact
from libc.stdint cimport INT64_MAX, UINT64_MAX, int64_t, uint8_t, uint32_t, uint64_t
from libc.stdlib cimport free, malloc, realloc
from libc.string cimport memcpy

from datastreamer._codec cimport (
    BatchColumns, as_event_type, as_file_offset, as_u64, columns_of, refuse_size,
)
from datastreamer._entry cimport (
    HEAD_SIZE, HEADER_PAGE_SIZE, MAX_BOOKMARK_SIZE, MAX_DATA_SIZE, PACKET_ENTRY, PACKET_PADDING,
    PAGE_SIZE, TYPE_BOOKMARK, get_u32, get_u64, page_room, put_head,
)
from datastreamer._run cimport AHEAD, prefetch

from datastreamer.errors import BadBookmark, CorruptEntries, NoOperation, UsageError

cdef extern from "Python.h":
    # Borrowed references, for loops in which no Python code runs.
    PyObject** PySequence_Fast_ITEMS(object sequence)
    Py_ssize_t PySequence_Fast_GET_SIZE(object sequence)
    bint is_bytes "PyBytes_CheckExact"(PyObject* item) noexcept
    char* bytes_of "PyBytes_AS_STRING"(PyObject* item) noexcept
    Py_ssize_t size_of "PyBytes_GET_SIZE"(PyObject* item) noexcept

cdef enum:
    SMALLEST_ARENA = 64 << 10
    SPILL_SIZE = PAGE_SIZE
    # While a thread writes some arenas, the next one is filled.
    MOST_SPARE_ARENAS = 2
    # An operation with more bookmarks than this, some 2.5 MB of Python objects, discards them: the
    # index then reads them from the file.
    MOST_BOOKMARKS = 20_000

KEPT_BOOKMARKS = MOST_BOOKMARKS

cdef int64_t LARGEST_OPERATION = <int64_t>1 << 50  # so offsets cannot overflow


cdef bytes copied(object data):
    """A copy of a bytes-like object."""
    cdef Py_buffer view
    PyObject_GetBuffer(data, &view, PyBUF_SIMPLE)
    try:
        return PyBytes_FromStringAndSize(<const char*>view.buf, view.len)
    finally:
        PyBuffer_Release(&view)


cdef Py_ssize_t measure(object items, bint refuse=True) except -2:
    """An upper bound of the packed size of a list or tuple of bytes, with padding marks.

    -1 if an item is of another type; raises `EntryTooLarge`, or without `refuse` returns -1. Runs
    no Python code.
    """
    cdef PyObject** item = PySequence_Fast_ITEMS(items)
    cdef Py_ssize_t i, size, total = 0
    for i in range(PySequence_Fast_GET_SIZE(items)):
        if not is_bytes(item[i]):
            return -1
        size = size_of(item[i])
        if size > MAX_DATA_SIZE:
            if not refuse:
                return -1
            refuse_size(size, i)
        total += HEAD_SIZE + size + 1
    return total


cdef class Arena:

    def __dealloc__(self):
        free(self.memory)

    def __getbuffer__(self, Py_buffer* buffer, int flags):
        PyBuffer_FillInfo(buffer, self, self.memory if self.memory != NULL else <uint8_t*>b"",
                          self.used, 1, flags)
        self.exports += 1

    def __releasebuffer__(self, Py_buffer* buffer):
        self.exports -= 1


@cython.no_gc_clear
cdef class Packed:

    def __cinit__(self, *args, **kwargs):
        self._arena = Arena.__new__(Arena)
        self._offset = HEADER_PAGE_SIZE

    def __dealloc__(self):
        free(self._segments)


@cython.final
cdef class Layout:
    """Where a batch's entries will be in the file if they are added next, unchanged.

    `segments` are (file offset, offset in the batch's `base`, length), padding marks included;
    `entries` are those of them that hold the entries, in order. The stream will end
    at `total_length` and `next_number`. `bookmarks` are (key, number); None if the operation will
    have more than it keeps.
    """

    cdef readonly list segments
    cdef readonly list entries
    cdef readonly list bookmarks
    cdef readonly int64_t total_length
    cdef readonly uint64_t next_number
    cdef uint64_t first_number

    cdef int add(self, int64_t offset, int64_t begin, int64_t size) except -1:
        segment = (offset, begin, size)
        self.segments.append(segment)
        self.entries.append(segment)
        return 0


@cython.no_gc_clear
cdef class EntryPacker(Packed):
    """The write side of an atomic operation: entries packed as they will be in the file.

    `segments` say where in the file the packed bytes of the arena belong. No segment crosses a
    page boundary: if an entry does not fit in the rest of its page, the segment ends with one 0
    byte (the padding mark) if a byte is left, and the next segment begins the next page. The rest
    of the padding is not written.

    Memory is bounded by spilling: if the arena has more than `spill_size` bytes, the next add
    calls `self.spill()` first, also in the middle of a bulk call. A subclass writes the segments
    there and calls `drain()`; it must not add entries. If it does not drain, `spill` is called
    again after `spill_size` more bytes. If it raises, the current entry is not added, the earlier
    ones are, and the next add calls it again: the operation can continue or be rolled back.

    Every `add_` method raises `NoOperation` if no operation has begun.
    """

    cdef Py_ssize_t _spill_size
    cdef Py_ssize_t _spill_at
    cdef Py_ssize_t _room         # bytes left in the page at `_offset`; 0 after a full page
    cdef list _spare              # earlier arenas, used again once they are not exported

    def __cinit__(self, *args, **kwargs):
        self._bookmarks = []
        self._spare = []
        self._room = PAGE_SIZE
        self._spill_size = self._spill_at = SPILL_SIZE

    def __init__(self, Py_ssize_t spill_size=SPILL_SIZE):
        if spill_size < 0:
            raise ValueError(f"spill_size is at least 0, not {spill_size}")
        self._spill_size = self._spill_at = spill_size

    def begin(self, total_length, total_entries):
        """Open an operation on a stream that ends there, and discard the previous one.

        `total_length` is a file offset, as in the header. The arena's memory is reused.
        """
        self._begin(as_file_offset(total_length), as_u64(total_entries, "the number of entries"))

    @cython.final
    cdef int _begin(self, int64_t offset, uint64_t number) except -1:
        if offset > INT64_MAX - LARGEST_OPERATION:
            raise ValueError(f"a stream of {offset} bytes has no space for an operation")
        if self._spare:
            self._spare = []
        self._empty()
        self._bookmarks = []
        self._offset = offset
        self._room = page_room(offset)
        self._number = number
        self._open = True
        return 0

    def close(self):
        """End the operation. The packed bytes can be read until the next `begin`."""
        self._open = False

    def drain(self):
        """Discard arena and segments: they are written, or the holder of the exported arena
        writes them. Positions and bookmarks remain. A few arenas are used in turn."""
        cdef Arena full = self._arena
        cdef Arena arena
        cdef Py_ssize_t i
        self._empty()
        if self._arena is full:
            return
        for i in range(len(self._spare)):
            arena = self._spare[i]
            if not arena.exports:
                del self._spare[i]
                self._arena = arena
                self._bytes = arena.memory
                self._size = arena.size
                break
        if len(self._spare) < MOST_SPARE_ARENAS and self._fits(full.size):
            self._spare.append(full)

    def spill(self):
        """Called if the arena exceeds `spill_size`; for subclasses. Does nothing here."""

    def refuse_without_operation(self):
        """Raise the error for an addition while no operation is open."""
        raise NoOperation("no atomic operation is open; begin one first")

    @property
    def is_open(self):
        """Whether an operation is open."""
        return self._open

    @property
    def next_number(self):
        """The next entry's number, and the total number of entries after a commit now."""
        return self._number

    @property
    def total_length(self):
        """The file offset just past the last entry, and the total length after a commit now."""
        return self._offset

    @property
    def bookmarks(self):
        """(key, entry number) of each bookmark since `begin`, in order; None if there are more
        than `KEPT_BOOKMARKS`."""
        return self._bookmarks

    @property
    def segments(self):
        """(file offset, offset in the arena, length) of each segment, in order; none is empty."""
        cdef Py_ssize_t i
        return [(self._segments[i].file_offset, self._segments[i].begin,
                 segment_end(self, i) - self._segments[i].begin) for i in range(self._count)]

    @property
    def arena(self):
        """The packed bytes of all segments: a read-only view of bytes that do not change."""
        self._arena.used = self._used
        return PyMemoryView_FromObject(self._arena)

    def entry_parts(self):
        """The packed entries in order, without the padding marks: for the part in each page its
        file offset, and a view of it."""
        cdef Py_ssize_t i, end
        view = self.arena
        parts = []
        for i in range(self._count):
            end = segment_end(self, i) - self._segments[i].padded
            if end > self._segments[i].begin:
                parts.append((self._segments[i].file_offset, view[self._segments[i].begin:end]))
        return parts

    def add_entry(self, type, data):
        """Add an event and return its number.

        Raises `BadEntryType` if `type` is not a u32 or is that of bookmarks (0xb0), and
        `EntryTooLarge` if `data` has more than 1,048,559 bytes.
        """
        return add_event(self, type, data)

    def add_bookmark(self, key):
        """Add a bookmark and return its number. Raises `BadBookmark` if its key is not 1 to 16
        bytes."""
        return self._add_mark(key)

    @cython.final
    cdef uint64_t _add_mark(self, key) except? 0xFFFFFFFFFFFFFFFF:
        cdef bytes its_key = key if PyBytes_CheckExact(key) else copied(key)
        cdef Py_ssize_t size = PyBytes_GET_SIZE(its_key)
        if not 1 <= size <= MAX_BOOKMARK_SIZE:
            raise BadBookmark(f"a bookmark's key is 1 to {MAX_BOOKMARK_SIZE} bytes, not {size}")
        self._ready(size)
        if self._bookmarks is not None:
            self._remember(its_key)
        self._put(TYPE_BOOKMARK, <const uint8_t*>PyBytes_AS_STRING(its_key), size)
        return self._number - 1

    def add_entries(self, type, data):
        """Add an event for each item of `data` and return the range of their numbers.

        `type` is one type for all, or one for each item. All items are checked first, as in
        `add_entry`: if one is refused, none is added.
        """
        cdef object items, types
        cdef uint32_t kind = 0
        cdef uint32_t* kinds = NULL
        cdef Py_ssize_t count, total, i
        cdef uint64_t first
        self._check(0)
        items = data if isinstance(data, (list, tuple)) else list(data)
        types = None if hasattr(type, "__index__") else tuple(type)
        try:
            if types is None:
                kind = as_event_type(type)
            else:
                kinds = <uint32_t*>malloc((len(types) + 1) * sizeof(uint32_t))
                if kinds == NULL:
                    raise MemoryError
                for i in range(<Py_ssize_t>len(types)):
                    kinds[i] = as_event_type(types[i])
            total = measure(items)
            if total < 0 or total > self._spill_at - self._used:
                # Python code will run in between: it must not change the items.
                if PyList_CheckExact(items):
                    items = PyList_AsTuple(items)
                elif not PyTuple_CheckExact(items):
                    items = tuple(items)
                    total = measure(items)
                if total < 0:
                    items = [copied(item) for item in items]
                    total = measure(items)
            count = PySequence_Fast_GET_SIZE(items)
            if types is not None and len(types) != count:
                raise ValueError(f"{len(types)} types for {count} entries")
            self._check(<uint64_t>count)
            if total <= self._spill_at - self._used:
                self._ensure(total)
            first = self._number
            self._put_all(kind, kinds, PySequence_Fast_ITEMS(items), count)
        finally:
            free(kinds)
        return range(first, first + <uint64_t>count)

    def add_batch(self, batch):
        """Add the entries of a batch, with new numbers; return the range of these.

        Bookmarks are accepted; `bookmarks` includes those with a key of 1 to 16 bytes.
        """
        cdef BatchColumns columns
        cdef Py_ssize_t i = 0, size
        cdef const uint8_t* data
        cdef uint64_t first = self._number
        columns_of(batch, &columns)
        self._check(<uint64_t>columns.count)
        while i < columns.count:
            data = columns.base + columns.offsets[i] + HEAD_SIZE
            size = columns.lengths[i]
            self._ready(size)
            if (columns.types[i] == TYPE_BOOKMARK and self._bookmarks is not None
                    and 1 <= size <= MAX_BOOKMARK_SIZE):
                self._remember(PyBytes_FromStringAndSize(<const char*>data, size))
            self._put(columns.types[i], data, size)
            i += 1
            if columns.numbers == NULL and self._number == columns.first_number + <uint64_t>i:
                # The batch has the bytes that the file will have, heads included.
                i = self._put_run(&columns, i)
        return range(first, first + <uint64_t>columns.count)

    def lay_out(self, batch):
        """The `Layout` of the batch after the entries that were added so far.

        Raises `NoOperation`, `UsageError` if the batch does not have the next numbers, and
        `CorruptEntries` if its memory changed since the scan.
        """
        cdef BatchColumns columns
        cdef Layout layout = Layout.__new__(Layout)
        cdef Py_ssize_t i, room = self._room, length
        cdef int64_t at, begin = 0, end = -1, offset = self._offset
        cdef const uint8_t* p
        columns_of(batch, &columns)
        self._check(<uint64_t>columns.count)
        if columns.numbers != NULL or columns.first_number != self._number:
            raise UsageError(f"the next entry is {self._number}: a batch from entry "
                             f"{columns.first_number} on, or with gaps, cannot follow")
        layout.segments, layout.entries = [], []
        layout.bookmarks = None if self._bookmarks is None else []
        layout.first_number = self._number
        for i in range(columns.count):
            at = columns.offsets[i]
            length = HEAD_SIZE + <Py_ssize_t>columns.lengths[i]
            p = columns.base + at
            if i + AHEAD < columns.count:
                prefetch(columns.base + columns.offsets[i + AHEAD])
            if (p[0] != PACKET_ENTRY or get_u32(p + 1) != <uint32_t>length
                    or get_u32(p + 5) != columns.types[i]
                    or get_u64(p + 9) != self._number + <uint64_t>i):
                raise CorruptEntries(at, "the entry was changed since it was scanned")
            if at != end or length > room:
                if end > begin:
                    layout.add(offset, begin, end - begin)
                    offset += end - begin
                begin = at
            if length > room:
                if room:
                    # The first byte of a length is 0, as a padding mark is.
                    layout.segments.append((offset, at + 1, 1))
                    offset += room
                room = PAGE_SIZE
            room -= length
            end = at + length
            if (layout.bookmarks is not None and columns.types[i] == TYPE_BOOKMARK
                    and HEAD_SIZE < length <= HEAD_SIZE + MAX_BOOKMARK_SIZE):
                if len(self._bookmarks) + len(layout.bookmarks) == MOST_BOOKMARKS:
                    layout.bookmarks = None
                    continue
                layout.bookmarks.append((
                    PyBytes_FromStringAndSize(<const char*>p + HEAD_SIZE, length - HEAD_SIZE),
                    self._number + <uint64_t>i))
        if columns.count:
            layout.add(offset, begin, end - begin)
            offset += end - begin
        layout.total_length = offset
        layout.next_number = self._number + <uint64_t>columns.count
        return layout

    def follow(self, Layout layout not None):
        """Add the entries of a layout, which the caller has written to their place.

        It was made for the current position, and what was packed before is drained.
        """
        if not self._open or self._count or layout.first_number != self._number:
            raise RuntimeError("the layout is not for the current position")
        if layout.bookmarks is None:
            self._bookmarks = None
        else:
            self._bookmarks.extend(layout.bookmarks)
        self._offset = layout.total_length
        self._room = page_room(self._offset)
        self._number = layout.next_number

    @cython.final
    cdef int _check(self, uint64_t count) except -1:
        """Raise an error unless `count` more entries may be added."""
        if not self._open:
            self.refuse_without_operation()
        # No entry has the largest u64 as its number: a u64 could not hold the total after it.
        if count > UINT64_MAX - self._number:
            raise UsageError(f"no numbers are left for {count} entries from {self._number} on")
        return 0

    @cython.final
    cdef inline int _ready(self, Py_ssize_t size) except -1:
        """Prepare for the next entry, with `size` bytes of data; spills if the arena is full."""
        if size > MAX_DATA_SIZE:
            refuse_size(size)
        if not self._open or self._number == UINT64_MAX:
            self._check(1)
        if self._used > self._spill_at:
            self._call_spill()
        return self._ensure(HEAD_SIZE + size + 1)

    @cython.final
    cdef int _call_spill(self) except -1:
        cdef uint64_t number = self._number
        self.spill()
        self._check(1)
        if self._number != number:
            raise RuntimeError("spill() must not add entries")
        if self._used > self._spill_at:
            self._spill_at = self._used + self._spill_size
        return 0

    @cython.final
    cdef inline int _ensure(self, Py_ssize_t size) except -1:
        """Ensure space for `size` bytes in the arena and for two segments. Runs no Python code."""
        if size > self._size - self._used or self._capacity - self._count < 2:
            self._grow(size)
        return 0

    @cython.final
    cdef int _grow(self, Py_ssize_t size) except -1:
        cdef Py_ssize_t capacity = self._capacity * 2 + 4
        cdef Py_ssize_t arena_size = self._size + (self._size >> 1)
        cdef Arena arena = self._arena
        cdef void* moved
        if self._capacity - self._count < 2:
            moved = realloc(self._segments, capacity * sizeof(Segment))
            if moved == NULL:
                raise MemoryError
            self._segments = <Segment*>moved
            self._capacity = capacity
        if size <= self._size - self._used:
            return 0
        if size > PY_SSIZE_T_MAX - self._used:
            raise MemoryError
        arena_size = max(arena_size, self._used + size, SMALLEST_ARENA)
        if arena.exports:
            arena = Arena.__new__(Arena)
            moved = malloc(arena_size)
        else:
            moved = realloc(arena.memory, arena_size)
        if moved == NULL:
            raise MemoryError
        if arena is not self._arena:
            memcpy(moved, self._bytes, self._used)
        arena.memory = <uint8_t*>moved
        arena.size = arena_size
        self._arena = arena
        self._bytes = arena.memory
        self._size = arena_size
        return 0

    @cython.final
    cdef int _empty(self) except -1:
        """Discard what was packed. An exported or large arena is replaced."""
        if self._arena.exports or not self._fits(self._size):
            self._arena = Arena.__new__(Arena)
            self._bytes = NULL
            self._size = 0
        self._used = 0
        self._count = 0
        self._spill_at = self._spill_size
        return 0

    @cython.final
    cdef inline bint _fits(self, Py_ssize_t size) noexcept:
        """Whether an arena of `size` bytes may be reused."""
        return size >> 1 <= self._spill_size + 2 * PAGE_SIZE

    @cython.final
    cdef int _remember(self, bytes key) except -1:
        """Remember the bookmark that is put next. Requires `_ready`."""
        if len(self._bookmarks) == MOST_BOOKMARKS:
            self._bookmarks = None
            return 0
        pair = (key, self._number)
        # The new tuple may have run the garbage collector, and with it Python code.
        self._ensure(HEAD_SIZE + MAX_BOOKMARK_SIZE + 1)
        self._bookmarks.append(pair)
        return 0

    @cython.final
    cdef inline void _open_segment(self) noexcept:
        self._segments[self._count].file_offset = self._offset
        self._segments[self._count].begin = self._used
        self._segments[self._count].padded = False
        self._count += 1

    @cython.final
    cdef void _turn(self, Py_ssize_t length) noexcept:
        """Open the segment for an entry of `length` bytes, in the next page if necessary."""
        if self._count == 0 and self._room:
            self._open_segment()
        if length > self._room:
            if self._room:
                self._bytes[self._used] = PACKET_PADDING
                self._used += 1
                self._segments[self._count - 1].padded = True
                self._offset += self._room
            self._room = PAGE_SIZE
            self._open_segment()

    @cython.final
    cdef inline void _put(self, uint32_t kind, const uint8_t* data, Py_ssize_t size) noexcept:
        """Pack an entry. Requires `_ready`."""
        cdef Py_ssize_t length = HEAD_SIZE + size
        cdef uint8_t* p
        if length > self._room or self._count == 0:
            self._turn(length)
        p = self._bytes + self._used
        put_head(p, PACKET_ENTRY, <uint32_t>length, kind, self._number)
        memcpy(p + HEAD_SIZE, data, size)
        self._used += length
        self._offset += length
        self._room -= length
        self._number += 1

    @cython.final
    cdef Py_ssize_t _put_run(self, BatchColumns* columns, Py_ssize_t first) except -1:
        """Pack the batch's entries from `first` on in one copy: those that are contiguous and fit
        in the page, up to a bookmark or the next spill. Returns the index of the first one left.
        """
        cdef int64_t begin, end
        cdef Py_ssize_t i = first, room = self._room, length
        if first >= columns.count or self._count == 0:
            return first
        if self._spill_at < self._used:
            return first
        if room > self._spill_at - self._used + 1:
            room = self._spill_at - self._used + 1
        begin = end = columns.offsets[first]
        while i < columns.count:
            length = HEAD_SIZE + <Py_ssize_t>columns.lengths[i]
            if (
                columns.types[i] == TYPE_BOOKMARK
                or columns.offsets[i] != end
                or length > room
                or columns.base[end] != PACKET_ENTRY
            ):
                break
            end += length
            room -= length
            i += 1
        if i > first:
            length = <Py_ssize_t>(end - begin)
            self._ensure(length + 1)
            memcpy(self._bytes + self._used, columns.base + begin, length)
            self._used += length
            self._offset += length
            self._room -= length
            self._number += <uint64_t>(i - first)
        return i

    @cython.final
    cdef inline uint64_t _add(self, uint32_t kind, const uint8_t* data,
                              Py_ssize_t size) except? 0xFFFFFFFFFFFFFFFF:
        self._ready(size)
        self._put(kind, data, size)
        return self._number - 1

    @cython.final
    cdef int _put_all(self, uint32_t kind, const uint32_t* kinds, PyObject** items,
                      Py_ssize_t count) except -1:
        """Pack `count` bytes objects, which other code cannot change meanwhile."""
        cdef Py_ssize_t i
        for i in range(count):
            self._add(kinds[i] if kinds != NULL else kind,
                      <const uint8_t*>bytes_of(items[i]), size_of(items[i]))
        return 0


cdef int begin_operation(Packed packed, int64_t offset, uint64_t number) except -1:
    """As `EntryPacker.begin`."""
    return (<EntryPacker>packed)._begin(offset, number)


cdef object add_event(Packed packed, object type, object data):
    """As `EntryPacker.add_entry`."""
    cdef EntryPacker packer = <EntryPacker>packed
    cdef uint32_t kind = as_event_type(type)
    cdef Py_buffer view
    if PyBytes_CheckExact(data):
        return packer._add(kind, <const uint8_t*>PyBytes_AS_STRING(data), PyBytes_GET_SIZE(data))
    PyObject_GetBuffer(data, &view, PyBUF_SIMPLE)
    try:
        return packer._add(kind, <const uint8_t*>view.buf, view.len)
    finally:
        PyBuffer_Release(&view)


cdef object add_mark(Packed packed, object key):
    """As `EntryPacker.add_bookmark`."""
    return (<EntryPacker>packed)._add_mark(key)
