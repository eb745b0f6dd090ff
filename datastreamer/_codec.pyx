"""The hot path: entries to bytes, bytes to entries.

Owns the packing of entries and pages, the one scanner of runs of entries, the batches
it gives, and the tables for point reads. Knows bytes; must not know files, sockets or
clocks. The loops over bytes (`_entry.pxd`, `_run.pxd`) return codes; the functions here
raise. Everything is as safe between threads as the GIL makes it, and no more.
"""

cimport cython
from cpython.buffer cimport (
    PyBUF_FORMAT, PyBUF_ND, PyBUF_SIMPLE, PyBUF_STRIDES, PyBUF_WRITABLE, PyBuffer_FillInfo,
    PyBuffer_Release, PyObject_GetBuffer,
)
from cpython.bytes cimport (
    PyBytes_AS_STRING, PyBytes_CheckExact, PyBytes_FromStringAndSize, PyBytes_GET_SIZE,
)
from cpython.long cimport PyLong_AsLongLongAndOverflow
from cpython.memoryview cimport PyMemoryView_FromObject
from cpython.object cimport PyObject
from libc.stdint cimport int64_t, uint8_t, uint32_t, uint64_t
from libc.stdlib cimport free, malloc, realloc
from libc.string cimport memcpy, memmove

from datastreamer._entry cimport (
    CROSSING, EMPTY_PAGE, FOREIGN, HEAD_SIZE, HEADER_PAGE_SIZE, LONG, MAX_BOOKMARK_SIZE,
    MAX_DATA_SIZE, NOTHING, NO_MEMORY, OUT_OF_SEQUENCE, PACKET_ENTRY, PACKET_PADDING, PADDING,
    PAGE_SIZE, PART, SHORT, TYPE_BOOKMARK, Verdict, WHOLE, get_u32, get_u64, judge, put_head,
)
from datastreamer._run cimport Run, resize_columns, scan_run, step_over

from operator import index as as_index

from datastreamer.errors import (
    BadBookmark, BadEntryType, CorruptEntries, EntryTooLarge, NoOperation, UsageError,
)

cdef extern from "Python.h":
    # Borrowed: for loops in which no Python code runs.
    PyObject** PySequence_Fast_ITEMS(object sequence)
    Py_ssize_t PySequence_Fast_GET_SIZE(object sequence)
    bint is_bytes "PyBytes_CheckExact"(PyObject* item) noexcept
    char* bytes_of "PyBytes_AS_STRING"(PyObject* item) noexcept
    Py_ssize_t size_of "PyBytes_GET_SIZE"(PyObject* item) noexcept

cdef enum:
    # Below so many bytes a scan keeps the GIL: it takes some 50 us, and beside a busy
    # thread it takes longer than that to get the GIL back.
    UNLOCKED_FROM = 256 << 10
    # A page table has a point at least every so many entries, or bytes.
    POINT_ENTRIES = 32
    POINT_BYTES = 8 << 10
    SMALLEST_ARENA = 64 << 10
    SPILL_SIZE = 4 << 20

cdef uint64_t U32_MAX = 0xFFFFFFFF
cdef uint64_t U64_MAX = <uint64_t>0xFFFFFFFFFFFFFFFF
cdef Py_ssize_t UNBOUNDED = <Py_ssize_t>(<size_t>-1 >> 1)
cdef int64_t LAST_OFFSET = <int64_t>(U64_MAX >> 1)
cdef int64_t LARGEST_OPERATION = <int64_t>1 << 50  # none comes near: offsets cannot overflow
cdef uint8_t NO_BYTES = 0


# Arguments

cdef uint64_t as_u64(object value, str what) except? 0xFFFFFFFFFFFFFFFF:
    try:
        return as_index(value)
    except OverflowError:
        raise ValueError(f"{what} is 0 to {U64_MAX}, not {value}") from None


cdef inline uint32_t as_type(object value) except? 0xFFFFFFFF:
    cdef int overflow = 0
    cdef long long kind
    if not isinstance(value, int):
        value = as_index(value)
    kind = PyLong_AsLongLongAndOverflow(value, &overflow)
    if overflow or kind < 0 or kind > <long long>U32_MAX:
        raise BadEntryType(f"an entry type is 0 to {U32_MAX}, not {value}")
    return <uint32_t>kind


cdef inline uint32_t as_event_type(object value) except? 0xFFFFFFFF:
    cdef uint32_t kind = as_type(value)
    if kind == TYPE_BOOKMARK:
        raise BadEntryType("entry type 0xb0 belongs to bookmarks; add them with add_bookmark")
    return kind


cdef uint8_t as_packet(object value) except? 0xFF:
    cdef uint64_t packet = as_u64(value, "a packet type")
    if packet > 0xFF:
        raise ValueError(f"a packet type is one byte, not {value}")
    return <uint8_t>packet


cdef int64_t as_file_offset(object value) except -1:
    """A file offset at which data may stand."""
    cdef uint64_t offset = as_u64(value, "a file offset")
    if not HEADER_PAGE_SIZE <= offset <= <uint64_t>LAST_OFFSET:
        raise ValueError(f"data stands at file offsets {HEADER_PAGE_SIZE} to {LAST_OFFSET}, "
                         f"not at {offset}")
    return <int64_t>offset


cdef inline Py_ssize_t page_room(int64_t file_offset) noexcept:
    """The bytes from a file offset to the end of its page: 1 to a page's size."""
    return PAGE_SIZE - <Py_ssize_t>((file_offset - HEADER_PAGE_SIZE) % PAGE_SIZE)


cdef Py_ssize_t span_end(Py_ssize_t size, Py_ssize_t start, object end) except -1:
    """Where the span ends that begins at `start` in a buffer of `size` bytes."""
    cdef Py_ssize_t stop = size if end is None else end
    if not 0 <= start <= stop <= size:
        raise ValueError(f"bytes {start} to {stop} are no span of a buffer of {size} bytes")
    return stop


cdef int refuse_size(Py_ssize_t size, Py_ssize_t item=-1) except -1:
    where = "" if item < 0 else f" (item {item})"
    raise EntryTooLarge(f"an entry holds at most {MAX_DATA_SIZE:,} bytes of data, "
                        f"not {size:,}{where}")


cdef object corrupt(Verdict why, const uint8_t* base, Py_ssize_t at, Py_ssize_t room,
                    uint64_t due, uint32_t longest):
    """The exception for what was just judged at `base + at`."""
    cdef const uint8_t* p = base + at
    if why == FOREIGN:
        reason = f"packet type {p[0]} is neither an entry (2) nor padding (0)"
    elif why == EMPTY_PAGE:
        reason = "the page begins with padding, not with an entry"
    elif why == PADDING:
        reason = "padding where an entry is due"
    elif why == SHORT:
        reason = f"entry length {get_u32(p + 1)} does not cover the head of {HEAD_SIZE} bytes"
    elif why == LONG:
        reason = f"entry length {get_u32(p + 1)} is above the bound of {longest} bytes"
    elif why == CROSSING:
        reason = f"the entry runs past the end of its page, which is {room} bytes away"
    elif why == OUT_OF_SEQUENCE and due == U64_MAX:
        reason = f"entry number {due} is due, and no stream can hold it"
    elif why == OUT_OF_SEQUENCE:
        reason = f"entry number {get_u64(p + 9)} where {due} is due"
    else:
        reason = "the entry is not whole"
    return CorruptEntries(at, reason)


# Memory that Python sees

@cython.final
@cython.no_gc_clear
cdef class _Source:
    """A foreign buffer, held until nobody needs its bytes any more."""

    cdef object base
    cdef Py_buffer view
    cdef bint held

    def __dealloc__(self):
        if self.held:
            PyBuffer_Release(&self.view)


cdef _Source hold(object base):
    cdef _Source source = _Source.__new__(_Source)
    PyObject_GetBuffer(base, &source.view, PyBUF_SIMPLE)
    source.held = True
    source.base = base
    return source


@cython.final
@cython.no_gc_clear
cdef class _View:
    """A read-only array in memory that `owner` keeps where it is."""

    cdef object owner
    cdef const void* memory
    cdef Py_ssize_t count
    cdef Py_ssize_t itemsize
    cdef const char* format

    def __getbuffer__(self, Py_buffer* buffer, int flags):
        if flags & PyBUF_WRITABLE:
            raise BufferError("the array is read-only")
        buffer.buf = <void*>self.memory
        buffer.obj = self
        buffer.len = self.count * self.itemsize
        buffer.readonly = 1
        buffer.itemsize = self.itemsize
        buffer.format = <char*>self.format if flags & PyBUF_FORMAT else NULL
        buffer.ndim = 1
        buffer.shape = &self.count if flags & PyBUF_ND else NULL
        buffer.strides = &self.itemsize if flags & PyBUF_STRIDES == PyBUF_STRIDES else NULL
        buffer.suboffsets = NULL
        buffer.internal = NULL


cdef object view_of(object owner, const void* memory, Py_ssize_t count, Py_ssize_t itemsize,
                    const char* format):
    cdef _View view = _View.__new__(_View)
    view.owner = owner
    view.memory = memory if memory != NULL else &NO_BYTES
    view.count = count
    view.itemsize = itemsize
    view.format = format
    return PyMemoryView_FromObject(view)


# Entries

@cython.final
@cython.freelist(256)
cdef class Entry:
    """One entry: `number` (u64), `type` (u32) and `data` (bytes). Never changes.

    Raises `BadEntryType` where the type is no u32, `EntryTooLarge` where the data is
    more than 1,048,559 bytes, `ValueError` where the number is no u64.
    """

    cdef readonly uint64_t number
    cdef readonly bytes data
    cdef readonly uint32_t type

    def __init__(self, number, type, bytes data not None):
        if self.data is not None:
            raise TypeError("an Entry does not change")
        if len(data) > MAX_DATA_SIZE:
            refuse_size(len(data))
        self.number = as_u64(number, "an entry number")
        self.type = as_type(type)
        self.data = data

    @property
    def is_bookmark(self):
        """Whether its type is the bookmarks' (0xb0)."""
        return self.type == TYPE_BOOKMARK

    def pack(self, packet_type=PACKET_ENTRY):
        """Its bytes on disk and on the wire: 17 bytes of head, then the data."""
        return pack_entry(self.number, self.type, self.data, packet_type)

    def __eq__(self, other):
        if not isinstance(other, Entry):
            return NotImplemented
        cdef Entry entry = <Entry>other
        return (self.number == entry.number and self.type == entry.type
                and self.data == entry.data)

    def __hash__(self):
        return hash((self.number, self.type, self.data))

    def __repr__(self):
        return f"Entry(number={self.number}, type={self.type}, data={self.data!r})"

    def __reduce__(self):
        return Entry, (self.number, self.type, self.data)


cdef inline Entry new_entry(uint64_t number, uint32_t kind, const uint8_t* data, Py_ssize_t size):
    cdef Entry entry = Entry.__new__(Entry)
    entry.number = number
    entry.type = kind
    entry.data = PyBytes_FromStringAndSize(<const char*>data, size)
    return entry


# Batches

@cython.final
cdef class _Columns:
    """The memory of the columns, shared by a batch and its slices."""

    cdef int64_t* offsets
    cdef uint32_t* lengths
    cdef uint32_t* types

    def __dealloc__(self):
        free(self.offsets)
        free(self.lengths)
        free(self.types)


@cython.final
@cython.no_gc_clear
cdef class EntryBatch:
    """A run of whole entries in a buffer: the buffer, and a column for each of their fields.

    A sequence of `Entry` objects, each made when it is asked for; a slice is a batch
    on the same buffer and columns. Made by `scan` alone. The buffer stays exported
    while the batch, a slice of it or a view from it lives.

    `first_number` is the number of the first entry, or the one that is due where there
    is none (0 where not even that is known). `start` and `end` are the span in the
    buffer, `end` just past the last whole entry. What stopped the scan there (a slice
    does not say): `more` is True where the beginning of another entry follows, and
    `needed` is how many bytes after `end` it needs at least: up to the end of a head of
    17 bytes, or of the entry once its head is there. `stopped_at` is the first byte of
    what is no entry in a scan of wire bytes, else -1.
    """

    cdef _Source _source
    cdef _Columns _columns
    cdef const uint8_t* _bytes
    cdef const int64_t* _offsets
    cdef const uint32_t* _lengths
    cdef const uint32_t* _types
    cdef Py_ssize_t _count
    cdef Py_ssize_t _nbytes      # -1: not added up yet
    cdef readonly uint64_t first_number
    cdef readonly Py_ssize_t start
    cdef readonly Py_ssize_t end
    cdef readonly Py_ssize_t needed
    cdef readonly int stopped_at
    cdef readonly bint more

    def __init__(self):
        raise TypeError("an EntryBatch is made by scan()")

    @property
    def base(self):
        """The object that was scanned."""
        return None if self._source is None else self._source.base

    @property
    def next_number(self):
        """The number after the last entry's."""
        return self.first_number + <uint64_t>self._count

    @property
    def offsets(self):
        """For each entry where its 17-byte head begins in `base` (int64, read-only)."""
        return view_of(self._columns, self._offsets, self._count, sizeof(int64_t), b"q")

    @property
    def lengths(self):
        """For each entry the bytes of its data, without the head (uint32, read-only)."""
        return view_of(self._columns, self._lengths, self._count, sizeof(uint32_t), b"I")

    @property
    def types(self):
        """For each entry its type (uint32, read-only)."""
        return view_of(self._columns, self._types, self._count, sizeof(uint32_t), b"I")

    @property
    def nbytes(self):
        """The bytes of all entries, head and data."""
        cdef Py_ssize_t i
        if self._nbytes < 0:
            self._nbytes = self._count * HEAD_SIZE
            for i in range(self._count):
                self._nbytes += self._lengths[i]
        return self._nbytes

    def data(self, index):
        """The data of the entry at `index`, as a read-only view: nothing is copied."""
        cdef Py_ssize_t i = self._place(index)
        return view_of(self._source, self._bytes + self._offsets[i] + HEAD_SIZE,
                       self._lengths[i], 1, b"B")

    def bookmarks(self):
        """The bookmarks that can be asked for, with keys of 1 to 16 bytes: [(key, number)]."""
        cdef list found = []
        cdef Py_ssize_t i
        for i in range(self._count):
            if self._types[i] == TYPE_BOOKMARK and 1 <= self._lengths[i] <= MAX_BOOKMARK_SIZE:
                found.append((
                    PyBytes_FromStringAndSize(
                        <const char*>self._bytes + self._offsets[i] + HEAD_SIZE, self._lengths[i]),
                    self.first_number + <uint64_t>i,
                ))
        return found

    def packed(self):
        """The entries' bytes as they stand in `base`, joined: padding is left out."""
        cdef bytes packed = PyBytes_FromStringAndSize(NULL, self.nbytes)
        cdef char* to = PyBytes_AS_STRING(packed)
        cdef Py_ssize_t begin, end
        cdef Py_ssize_t i = 0
        while i < self._count:
            begin = end = self._offsets[i]
            while i < self._count and self._offsets[i] == end:
                end += HEAD_SIZE + <Py_ssize_t>self._lengths[i]
                i += 1
            memcpy(to, self._bytes + begin, end - begin)
            to += end - begin
        return packed

    def __len__(self):
        return self._count

    def __bool__(self):
        return self._count > 0

    def __getitem__(self, index):
        if isinstance(index, slice):
            start, stop, step = index.indices(self._count)
            if step != 1:
                raise ValueError(f"a slice of a batch has step 1, not {step}")
            return self._slice(start, max(start, stop))
        cdef Py_ssize_t i = self._place(index)
        return self._entry(i)

    def __iter__(self):
        cdef _Entries entries = _Entries.__new__(_Entries)
        entries.batch = self
        return entries

    def __repr__(self):
        return (f"<EntryBatch of {self._count} entries from number {self.first_number}, "
                f"{self.nbytes} bytes>")

    def __reduce__(self):
        raise TypeError("an EntryBatch cannot be pickled; pickle packed() and scan it there")

    cdef Py_ssize_t _place(self, object index) except -1:
        cdef Py_ssize_t i = as_index(index)
        if i < 0:
            i += self._count
        if not 0 <= i < self._count:
            raise IndexError(f"no entry at {index} in a batch of {self._count}")
        return i

    cdef inline Entry _entry(self, Py_ssize_t i):
        return new_entry(self.first_number + <uint64_t>i, self._types[i],
                         self._bytes + self._offsets[i] + HEAD_SIZE, self._lengths[i])

    cdef EntryBatch _slice(self, Py_ssize_t start, Py_ssize_t stop):
        cdef EntryBatch part = EntryBatch.__new__(EntryBatch)
        part._source = self._source
        part._columns = self._columns
        part._bytes = self._bytes
        part._count = stop - start
        part._nbytes = -1
        part.first_number = self.first_number + <uint64_t>start
        part.stopped_at = -1
        part.start = self._offsets[start] if start < self._count else self.end
        part.end = part.start
        if part._count:
            part._offsets = self._offsets + start
            part._lengths = self._lengths + start
            part._types = self._types + start
            part.end = self._offsets[stop - 1] + HEAD_SIZE + <Py_ssize_t>self._lengths[stop - 1]
        return part


@cython.final
cdef class _Entries:
    """The iterator of a batch."""

    cdef EntryBatch batch
    cdef Py_ssize_t at

    def __iter__(self):
        return self

    def __next__(self):
        cdef Py_ssize_t i = self.at
        if self.batch is None or i >= self.batch._count:
            raise StopIteration
        self.at = i + 1
        return self.batch._entry(i)

    def __length_hint__(self):
        return 0 if self.batch is None else self.batch._count - self.at


def scan(buffer, first_number=None, *, Py_ssize_t start=0, end=None, file_offset=None,
         max_entries=None, max_data=MAX_DATA_SIZE):
    """Find the whole entries in bytes `start` to `end` of `buffer`, in one pass.

    `first_number` is the number that is due (None: whatever the first entry has), and
    numbers follow one another. At most `max_entries` are taken; `max_data` bounds the
    data of each.

    Without `file_offset` the bytes come from a wire: entries without padding, and the
    run ends at a byte that begins none (`EntryBatch.stopped_at`). With it, the file
    offset of `buffer[start]`, the bytes come from a stream file: padding is skipped to
    the next page, and a page has to begin with an entry. An incomplete last entry is
    no damage (`EntryBatch.more`); a head is judged when all of it is there.

    Raises `CorruptEntries` with the offset in `buffer`: a length below 17 or above the
    bound, a number out of sequence and, in a file, another packet type, an entry that
    runs past the end of its page or a page that begins with padding. `ValueError`: the
    span, an offset or a bound is not possible.

    From 256 KiB on the GIL is let go meanwhile: nobody may change the bytes then.
    """
    cdef _Source source = hold(buffer)
    cdef _Columns columns = _Columns.__new__(_Columns)
    cdef EntryBatch batch
    cdef Run run
    cdef Verdict verdict
    cdef uint64_t longest = as_u64(max_data, "max_data")
    if longest > MAX_DATA_SIZE:
        raise ValueError(f"max_data is at most {MAX_DATA_SIZE}, not {max_data}")
    run.base = <const uint8_t*>source.view.buf
    run.at = run.last_end = start
    run.end = span_end(source.view.len, start, end)
    run.paged = file_offset is not None
    run.room = page_room(as_file_offset(file_offset)) if run.paged else UNBOUNDED
    run.number_known = first_number is not None
    run.number = as_u64(first_number, "first_number") if run.number_known else 0
    run.longest = <uint32_t>longest + HEAD_SIZE
    run.length = 0
    run.offsets = NULL
    run.lengths = run.types = NULL
    run.count = run.capacity = run.nbytes = 0
    run.most = UNBOUNDED
    if max_entries is not None:
        run.most = max_entries
        if run.most < 0:
            raise ValueError(f"max_entries is at least 0, not {max_entries}")
    if run.end - start < UNLOCKED_FROM:
        verdict = scan_run(&run)
    else:
        with nogil:
            verdict = scan_run(&run)
            if run.count and run.capacity - run.count > (run.count >> 2) + 64:
                resize_columns(&run, run.count)
    columns.offsets = run.offsets
    columns.lengths = run.lengths
    columns.types = run.types
    if verdict == NO_MEMORY:
        raise MemoryError
    if not (verdict in (WHOLE, NOTHING, PART)
            or (not run.paged and verdict in (PADDING, FOREIGN))):
        raise corrupt(verdict, run.base, run.at, run.room, run.number, run.longest)

    batch = EntryBatch.__new__(EntryBatch)
    batch._source = source
    batch._columns = columns
    batch._bytes = run.base
    batch._offsets = run.offsets
    batch._lengths = run.lengths
    batch._types = run.types
    batch._count = run.count
    batch._nbytes = run.nbytes
    batch.first_number = run.number - <uint64_t>run.count
    batch.start = start
    batch.end = run.last_end
    batch.more = verdict == PART
    batch.needed = run.at - run.last_end + run.length if verdict == PART else 0
    batch.stopped_at = run.base[run.at] if verdict in (PADDING, FOREIGN) else -1
    return batch


# Walks: no columns

def walk(buffer, number, *, Py_ssize_t start=0, end=None, file_offset):
    """Go over the whole entries of one page: (where the last ends, the number after it).

    Begins with entry `number` at byte `start` of `buffer`, which stands at
    `file_offset` of the file, and stops at padding, at the page's end, at `end` or at
    an entry that is not whole. The first of the two is an offset in `buffer`. Raises
    what `scan` raises.
    """
    cdef Py_buffer view
    cdef uint64_t due = as_u64(number, "an entry number")
    cdef Py_ssize_t room = page_room(as_file_offset(file_offset))
    cdef Py_ssize_t at = start, stop
    cdef uint32_t length = 0
    cdef Verdict verdict = WHOLE
    PyObject_GetBuffer(buffer, &view, PyBUF_SIMPLE)
    try:
        stop = span_end(view.len, start, end)
        while verdict == WHOLE and room:
            verdict = step_over(<const uint8_t*>view.buf, &at, stop, &room, &due, &length)
        if verdict not in (WHOLE, NOTHING, PART, PADDING):
            raise corrupt(verdict, <const uint8_t*>view.buf, at, room, due, PAGE_SIZE)
    finally:
        PyBuffer_Release(&view)
    return at, due


def entry_at(buffer, number, *, Py_ssize_t start, start_number, end=None):
    """Find entry `number`: (the offset of its head in `buffer`, its data's length, its type).

    Walks from `start`, where entry `start_number` stands, and not past `end`; there is
    no padding in between. The whole entry is inside. Raises `CorruptEntries` where the
    chain is broken or ends before the entry does, `ValueError` where `number` stands
    before `start_number`.
    """
    cdef Py_buffer view
    cdef uint64_t wanted = as_u64(number, "an entry number")
    cdef uint64_t due = as_u64(start_number, "an entry number")
    cdef Py_ssize_t at = start, before = start, room = UNBOUNDED, stop
    cdef uint32_t length = 0, kind
    cdef Verdict verdict
    if wanted < due:
        raise ValueError(f"entry {wanted} stands before entry {due}, where the walk begins")
    PyObject_GetBuffer(buffer, &view, PyBUF_SIMPLE)
    try:
        stop = span_end(view.len, start, end)
        while due <= wanted:
            before = at
            verdict = step_over(<const uint8_t*>view.buf, &at, stop, &room, &due, &length)
            if verdict == NOTHING:
                raise CorruptEntries(at, f"the entries end before entry {wanted}")
            if verdict != WHOLE:
                raise corrupt(verdict, <const uint8_t*>view.buf, at, room, due, PAGE_SIZE)
        kind = get_u32(<const uint8_t*>view.buf + before + 5)
    finally:
        PyBuffer_Release(&view)
    return before, length - HEAD_SIZE, kind


cdef struct Point:
    uint32_t offset    # in the page
    uint32_t index     # of the entry, counted in the page


cdef struct Place:
    int64_t offset     # in the file, of a point
    uint64_t number    # of the entry there
    int64_t limit      # in the file: the entry that is looked for is whole before it


@cython.final
cdef class PageTable:
    """Where the entries of one page stand: a point every 32 entries or 8 KiB, from its start.

    For the page at `page_file_offset`, whose first entry is `first_number`. Begins
    empty; `extend` makes it reach further: up to entry `next_number` (excluded), at
    file offset `end_offset`. `full` says that no entry of the page is behind that.
    `used` becomes true with each look-up; whoever keeps tables may set it to false.
    """

    cdef readonly uint64_t first_number
    cdef readonly uint64_t next_number
    cdef readonly int64_t page_file_offset
    cdef readonly int64_t end_offset
    cdef readonly bint full
    cdef public bint used
    cdef Point* _points
    cdef Py_ssize_t _count
    cdef Py_ssize_t _capacity

    def __cinit__(self, first_number, page_file_offset):
        self.page_file_offset = self.end_offset = as_file_offset(page_file_offset)
        if (page_room(self.page_file_offset) != PAGE_SIZE
                or self.page_file_offset > LAST_OFFSET - PAGE_SIZE):
            raise ValueError(f"no page begins at file offset {page_file_offset}")
        self.first_number = self.next_number = as_u64(first_number, "an entry number")

    def __dealloc__(self):
        free(self._points)

    @property
    def nbytes(self):
        """The memory it takes."""
        return PageTable.__basicsize__ + self._capacity * <Py_ssize_t>sizeof(Point)

    def extend(self, buffer, file_offset):
        """Go on over the page's whole entries in `buffer`; return how many came.

        `buffer` holds committed bytes of the file from `file_offset` on, which is not
        past `end_offset`. Raises what `scan` raises, and the table is as it was.
        """
        cdef Py_buffer view
        cdef int64_t offset = as_file_offset(file_offset)
        cdef uint32_t in_page = <uint32_t>(self.end_offset - self.page_file_offset)
        cdef Py_ssize_t room = PAGE_SIZE - in_page
        cdef Py_ssize_t at, count = self._count
        cdef uint64_t due = self.next_number
        cdef uint32_t length = 0, index, last_index = 0, last_in_page = 0
        cdef Verdict verdict = WHOLE
        if offset > self.end_offset:
            raise ValueError(f"the table ends at file offset {self.end_offset}, and the bytes "
                             f"begin at {offset} only")
        if count:
            last_index = self._points[count - 1].index
            last_in_page = self._points[count - 1].offset
        PyObject_GetBuffer(buffer, &view, PyBUF_SIMPLE)
        try:
            if self.end_offset - offset > view.len:
                return 0
            at = <Py_ssize_t>(self.end_offset - offset)
            while room:
                index = <uint32_t>(due - self.first_number)
                verdict = step_over(<const uint8_t*>view.buf, &at, view.len, &room, &due, &length)
                if verdict != WHOLE:
                    break
                if (count == 0 or index - last_index >= POINT_ENTRIES
                        or in_page - last_in_page >= POINT_BYTES):
                    if count == self._capacity:
                        self._grow()
                    self._points[count].offset = last_in_page = in_page
                    self._points[count].index = last_index = index
                    count += 1
                in_page += length
            if verdict not in (WHOLE, NOTHING, PART, PADDING):
                raise corrupt(verdict, <const uint8_t*>view.buf, at, room, due, PAGE_SIZE)
        finally:
            PyBuffer_Release(&view)
        index = <uint32_t>(due - self.next_number)
        self._count = count
        self.next_number = due
        self.end_offset = self.page_file_offset + in_page
        self.full = room == 0 or verdict == PADDING
        return index

    def find(self, number):
        """Where to look for an entry: (file offset, the number there, file offset of the end).

        The nearest point at or before the entry, and a bound of what has to be read:
        the entry is whole before it. Raises `IndexError` where the table does not reach.
        """
        cdef Place place = self._place(as_u64(number, "an entry number"))
        return place.offset, place.number, place.limit

    def read(self, number, read, bytes prefix not None, packet_type):
        """`prefix` and the packed entry with this packet type, or None where the bytes in
        the file are not what the table was made of.

        `read(size, file_offset)` gives bytes of the file, fewer only where it ends. Raises
        `IndexError` where the table does not reach.
        """
        cdef uint64_t wanted = as_u64(number, "an entry number")
        cdef uint8_t packet = as_packet(packet_type)
        cdef Place place = self._place(wanted)
        cdef Py_ssize_t at = 0, before = 0, room = UNBOUNDED, size = PyBytes_GET_SIZE(prefix)
        cdef uint32_t length = 0
        cdef bytes near = read(place.limit - place.offset, place.offset)
        cdef bytes found
        cdef uint8_t* to
        if near is None:
            raise TypeError("read() gave no bytes")
        while place.number <= wanted:
            before = at
            if step_over(<const uint8_t*>PyBytes_AS_STRING(near), &at, PyBytes_GET_SIZE(near),
                         &room, &place.number, &length) != WHOLE:
                return None
        found = PyBytes_FromStringAndSize(NULL, size + length)
        to = <uint8_t*>PyBytes_AS_STRING(found)
        memcpy(to, PyBytes_AS_STRING(prefix), size)
        memcpy(to + size, PyBytes_AS_STRING(near) + before, length)
        to[size] = packet
        return found

    cdef Place _place(self, uint64_t wanted) except *:
        cdef Place place
        cdef uint64_t index
        cdef Py_ssize_t low = 0, high = self._count, middle
        if not self.first_number <= wanted < self.next_number:
            raise IndexError(f"no entry {wanted} in a table of {self.first_number} to "
                             f"{self.next_number}, excluded")
        self.used = True
        index = wanted - self.first_number
        while high - low > 1:
            middle = (low + high) >> 1
            if self._points[middle].index <= index:
                low = middle
            else:
                high = middle
        place.limit = self.end_offset
        if high < self._count:
            place.limit = self.page_file_offset + self._points[high].offset
        place.offset = self.page_file_offset + self._points[low].offset
        place.number = self.first_number + self._points[low].index
        return place

    def __repr__(self):
        return (f"<PageTable of the page at {self.page_file_offset}: {self._count} points for "
                f"entries {self.first_number} to {self.next_number}, excluded>")

    cdef int _grow(self) except -1:
        cdef Py_ssize_t capacity = self._capacity * 2 if self._capacity else 16
        cdef void* moved = realloc(self._points, capacity * sizeof(Point))
        if moved == NULL:
            raise MemoryError
        self._points = <Point*>moved
        self._capacity = capacity
        return 0


# Packing

def pack_entry(number, type, data, packet_type=PACKET_ENTRY):
    """One entry's bytes: 17 bytes of head, then the data.

    Raises `BadEntryType` where `type` is no u32 (bookmarks' type is welcome),
    `EntryTooLarge`, and `ValueError` where number or packet type do not fit.
    """
    cdef Py_buffer view
    cdef bytes packed
    cdef uint8_t* p
    cdef uint64_t its_number = as_u64(number, "an entry number")
    cdef uint32_t kind = as_type(type)
    cdef uint8_t packet = as_packet(packet_type)
    PyObject_GetBuffer(data, &view, PyBUF_SIMPLE)
    try:
        if view.len > MAX_DATA_SIZE:
            refuse_size(view.len)
        packed = PyBytes_FromStringAndSize(NULL, HEAD_SIZE + view.len)
        p = <uint8_t*>PyBytes_AS_STRING(packed)
        put_head(p, packet, <uint32_t>(HEAD_SIZE + view.len), kind, its_number)
        memcpy(p + HEAD_SIZE, view.buf, view.len)
    finally:
        PyBuffer_Release(&view)
    return packed


def pack_entry_into(buffer, Py_ssize_t offset, number, type, data, packet_type=PACKET_ENTRY):
    """Pack an entry at `offset` of a writable buffer; return where it ends.

    `data` may be a part of the same buffer. Raises what `pack_entry` raises, and
    `ValueError` where the entry does not fit; nothing is written then.
    """
    cdef Py_buffer view, target
    cdef uint8_t* p
    cdef uint64_t its_number = as_u64(number, "an entry number")
    cdef uint32_t kind = as_type(type)
    cdef uint8_t packet = as_packet(packet_type)
    cdef Py_ssize_t length
    PyObject_GetBuffer(data, &view, PyBUF_SIMPLE)
    try:
        if view.len > MAX_DATA_SIZE:
            refuse_size(view.len)
        length = HEAD_SIZE + view.len
        PyObject_GetBuffer(buffer, &target, PyBUF_WRITABLE)
        try:
            if not 0 <= offset <= target.len or length > target.len - offset:
                raise ValueError(f"an entry of {length} bytes does not fit at {offset} of a "
                                 f"buffer of {target.len} bytes")
            p = <uint8_t*>target.buf + offset
            memmove(p + HEAD_SIZE, view.buf, view.len)  # before the head lands on it
            put_head(p, packet, <uint32_t>length, kind, its_number)
        finally:
            PyBuffer_Release(&target)
    finally:
        PyBuffer_Release(&view)
    return offset + length


cdef bytes copied(object data):
    """The bytes of a bytes-like object, as an object of our own."""
    cdef Py_buffer view
    PyObject_GetBuffer(data, &view, PyBUF_SIMPLE)
    try:
        return PyBytes_FromStringAndSize(<const char*>view.buf, view.len)
    finally:
        PyBuffer_Release(&view)


cdef Py_ssize_t measure(object items) except -2:
    """The bytes that a list or tuple of bytes packs to, padding marks included.

    -1 where it holds something else too; raises `EntryTooLarge`. Runs no Python code.
    """
    cdef PyObject** item = PySequence_Fast_ITEMS(items)
    cdef Py_ssize_t i, size, total = 0
    for i in range(PySequence_Fast_GET_SIZE(items)):
        if not is_bytes(item[i]):
            return -1
        size = size_of(item[i])
        if size > MAX_DATA_SIZE:
            refuse_size(size, i)
        total += HEAD_SIZE + size + 1
    return total


@cython.final
cdef class _Arena:
    """Memory for packed bytes. What is exported of it neither moves nor changes."""

    cdef uint8_t* memory
    cdef Py_ssize_t size
    cdef Py_ssize_t used       # what the next export shows
    cdef Py_ssize_t exports

    def __dealloc__(self):
        free(self.memory)

    def __getbuffer__(self, Py_buffer* buffer, int flags):
        PyBuffer_FillInfo(buffer, self, self.memory if self.memory != NULL else &NO_BYTES,
                          self.used, 1, flags)
        self.exports += 1

    def __releasebuffer__(self, Py_buffer* buffer):
        self.exports -= 1


cdef struct Segment:
    int64_t file_offset
    Py_ssize_t begin        # in the arena
    bint padded             # its last byte is a padding mark


@cython.no_gc_clear
cdef class EntryPacker:
    """The write side of an atomic operation: entries packed as they will stand in the file.

    Packed bytes gather in an arena; `segments` say where in the file they belong. None
    crosses a page: where an entry does not fit in what is left of its page, the segment
    ends with one 0 byte (the padding mark) if a byte is left, and the next begins with
    the next page. The rest of the padding is not written.

    Memory stays bounded by spilling: with more than `spill_size` bytes in the arena the
    next add calls `self.spill()` first, also in the middle of a bulk call. A subclass
    writes the segments there and calls `drain()`; it must not add. Where it does not
    drain (as here), it is asked again after as many bytes more. Where it raises, the
    entry it was called for is not added, the ones before it are, and the next add asks
    again: so the operation can go on, or be given up.

    Every `add_` raises `NoOperation` where `begin` did not come before.
    """

    cdef _Arena _arena
    cdef uint8_t* _bytes          # the arena's memory
    cdef Py_ssize_t _size         # and its size
    cdef Py_ssize_t _used
    cdef Py_ssize_t _spill_size
    cdef Py_ssize_t _spill_at
    cdef Segment* _segments
    cdef Py_ssize_t _count
    cdef Py_ssize_t _capacity
    cdef int64_t _offset          # in the file, where the next byte goes
    cdef Py_ssize_t _room         # what is left of the page there; 0 behind a full one
    cdef uint64_t _number
    cdef list _bookmarks
    cdef bint _open

    def __cinit__(self, *args, **kwargs):
        self._arena = _Arena.__new__(_Arena)
        self._bookmarks = []
        self._offset = HEADER_PAGE_SIZE
        self._room = PAGE_SIZE
        self._spill_size = self._spill_at = SPILL_SIZE

    def __init__(self, Py_ssize_t spill_size=SPILL_SIZE):
        if spill_size < 0:
            raise ValueError(f"spill_size is at least 0, not {spill_size}")
        self._spill_size = self._spill_at = spill_size

    def __dealloc__(self):
        free(self._segments)

    def begin(self, total_length, total_entries):
        """Open an operation on a stream that ends there; forget everything before.

        `total_length` is a file offset, as in the header. The arena's memory is kept.
        """
        cdef int64_t offset = as_file_offset(total_length)
        cdef uint64_t number = as_u64(total_entries, "the number of entries")
        if offset > LAST_OFFSET - LARGEST_OPERATION:
            raise ValueError(f"a stream of {offset} bytes has no place for an operation")
        self._empty()
        self._bookmarks = []
        self._offset = offset
        self._room = page_room(offset)
        self._number = number
        self._open = True

    def close(self):
        """End the operation. What it packed can be read until the next `begin`."""
        self._open = False

    def drain(self):
        """Forget arena and segments: they are written. Positions and bookmarks stay."""
        self._empty()

    def spill(self):
        """Called when the arena is above its limit; for subclasses. Does nothing here."""

    @property
    def is_open(self):
        """Whether an operation is open."""
        return self._open

    @property
    def next_number(self):
        """The next entry's number: the total of entries after a commit now."""
        return self._number

    @property
    def total_length(self):
        """The file offset just past the last entry: the total length after a commit now."""
        return self._offset

    @property
    def bookmarks(self):
        """(key, entry number) of each bookmark since `begin`, in order."""
        return self._bookmarks

    @property
    def segments(self):
        """(file offset, offset in the arena, length) of each segment, in order; none is empty."""
        cdef Py_ssize_t i
        return [(self._segments[i].file_offset, self._segments[i].begin,
                 self._segment_end(i) - self._segments[i].begin) for i in range(self._count)]

    @property
    def arena(self):
        """The packed bytes of all segments: a read-only view, whose bytes never change."""
        self._arena.used = self._used
        return PyMemoryView_FromObject(self._arena)

    def entry_spans(self):
        """Views of the packed entries in order, without the padding marks."""
        cdef Py_ssize_t i, end
        view = self.arena
        spans = []
        for i in range(self._count):
            end = self._segment_end(i) - self._segments[i].padded
            if end > self._segments[i].begin:
                spans.append(view[self._segments[i].begin:end])
        return spans

    def add_entry(self, type, data):
        """Add an event and return its number.

        Raises `BadEntryType` where `type` is no u32 or the bookmarks' own (0xb0),
        `EntryTooLarge` where `data` is more than 1,048,559 bytes.
        """
        cdef uint32_t kind = as_event_type(type)
        cdef Py_buffer view
        if PyBytes_CheckExact(data):
            return self._add(kind, <const uint8_t*>PyBytes_AS_STRING(data), PyBytes_GET_SIZE(data))
        PyObject_GetBuffer(data, &view, PyBUF_SIMPLE)
        try:
            return self._add(kind, <const uint8_t*>view.buf, view.len)
        finally:
            PyBuffer_Release(&view)

    def add_bookmark(self, key):
        """Add a bookmark and return its number. `BadBookmark`: its key is not 1 to 16 bytes."""
        cdef bytes its_key = key if PyBytes_CheckExact(key) else copied(key)
        cdef Py_ssize_t size = PyBytes_GET_SIZE(its_key)
        if not 1 <= size <= MAX_BOOKMARK_SIZE:
            raise BadBookmark(f"a bookmark's key is 1 to {MAX_BOOKMARK_SIZE} bytes, not {size}")
        self._ready(size)
        self._remember(its_key)
        self._put(TYPE_BOOKMARK, <const uint8_t*>PyBytes_AS_STRING(its_key), size)
        return self._number - 1

    def add_entries(self, type, data):
        """Add an event for each item of `data` and return the range of their numbers.

        `type` is one for all, or as many as there are items. Everything is checked
        first, with the errors of `add_entry`: if one item is refused, none is added.
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
                # Python code will run in between: give it nothing that it could change.
                items = tuple(items)
                if measure(items) < 0:
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

    def add_batch(self, EntryBatch batch not None):
        """Add the entries of a batch, with new numbers; return the range of these.

        Bookmarks are welcome, and noted where their key is 1 to 16 bytes.
        """
        cdef Py_ssize_t i, size
        cdef const uint8_t* data
        cdef uint64_t first = self._number
        self._check(<uint64_t>batch._count)
        for i in range(batch._count):
            data = batch._bytes + batch._offsets[i] + HEAD_SIZE
            size = batch._lengths[i]
            self._ready(size)
            if batch._types[i] == TYPE_BOOKMARK and 1 <= size <= MAX_BOOKMARK_SIZE:
                self._remember(PyBytes_FromStringAndSize(<const char*>data, size))
            self._put(batch._types[i], data, size)
        return range(first, first + <uint64_t>batch._count)

    @cython.final
    cdef int _check(self, uint64_t count) except -1:
        """Whether `count` more entries may be added."""
        if not self._open:
            raise NoOperation("no atomic operation is open; begin one first")
        # The last u64 names no entry: a total of entries could not count it.
        if count > U64_MAX - self._number:
            raise UsageError(f"no numbers are left for {count} entries from {self._number} on")
        return 0

    @cython.final
    cdef inline int _ready(self, Py_ssize_t size) except -1:
        """Let an entry with `size` bytes of data be put next; spills if it is time."""
        if size > MAX_DATA_SIZE:
            refuse_size(size)
        if not self._open or self._number == U64_MAX:
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
        """Have `size` bytes free in the arena, and two segments. Runs no Python code."""
        if size > self._size - self._used or self._capacity - self._count < 2:
            self._grow(size)
        return 0

    @cython.final
    cdef int _grow(self, Py_ssize_t size) except -1:
        cdef Py_ssize_t capacity = self._capacity * 2 + 4
        cdef Py_ssize_t arena_size = self._size + (self._size >> 1)
        cdef _Arena arena = self._arena
        cdef void* moved
        if self._capacity - self._count < 2:
            moved = realloc(self._segments, capacity * sizeof(Segment))
            if moved == NULL:
                raise MemoryError
            self._segments = <Segment*>moved
            self._capacity = capacity
        if size <= self._size - self._used:
            return 0
        if size > UNBOUNDED - self._used:
            raise MemoryError
        arena_size = max(arena_size, self._used + size, SMALLEST_ARENA)
        if arena.exports:
            arena = _Arena.__new__(_Arena)
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
        """Forget what was packed. An arena that is exported, or became huge, is left to others."""
        cdef Py_ssize_t usual = self._spill_size + 2 * PAGE_SIZE
        if self._arena.exports or self._size >> 1 > usual:
            self._arena = _Arena.__new__(_Arena)
            self._bytes = NULL
            self._size = 0
        self._used = 0
        self._count = 0
        self._spill_at = self._spill_size
        return 0

    @cython.final
    cdef inline Py_ssize_t _segment_end(self, Py_ssize_t i) noexcept:
        return self._used if i + 1 == self._count else self._segments[i + 1].begin

    @cython.final
    cdef int _remember(self, bytes key) except -1:
        """Note the bookmark that is put next; `_ready` came before."""
        pair = (key, self._number)
        self._ensure(HEAD_SIZE + MAX_BOOKMARK_SIZE + 1)  # a new tuple may have run a collection
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
        """Open the segment for an entry of `length` bytes, on the next page if need be."""
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
        """Pack an entry; `_ready` came before."""
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
    cdef inline uint64_t _add(self, uint32_t kind, const uint8_t* data,
                              Py_ssize_t size) except? 0xFFFFFFFFFFFFFFFF:
        self._ready(size)
        self._put(kind, data, size)
        return self._number - 1

    @cython.final
    cdef int _put_all(self, uint32_t kind, const uint32_t* kinds, PyObject** items,
                      Py_ssize_t count) except -1:
        """Pack `count` bytes objects, which nobody changes meanwhile."""
        cdef Py_ssize_t i
        for i in range(count):
            self._add(kinds[i] if kinds != NULL else kind,
                      <const uint8_t*>bytes_of(items[i]), size_of(items[i]))
        return 0
