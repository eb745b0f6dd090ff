"""The hot path: bytes to entries, and one entry to bytes.

Owns entries, the scanner of runs of entries, and batches. `_pages.pyx` walks over a page and has
the tables for point reads; `_packer.pyx` packs operations. Knows bytes; must not know files,
sockets or clocks. The loops over bytes (`_entry.pxd`, `_run.pxd`) return codes; the functions
here raise. Only the GIL protects objects from other threads.
"""

cimport cython
from cpython.buffer cimport (
    PyBUF_FORMAT, PyBUF_ND, PyBUF_SIMPLE, PyBUF_STRIDES, PyBUF_WRITABLE, PyBuffer_Release,
    PyObject_GetBuffer,
)
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize
from cpython.memoryview cimport PyMemoryView_FromObject
from cpython.number cimport PyNumber_Index as as_index
from cpython.pyport cimport PY_SSIZE_T_MAX as UNBOUNDED
from libc.stdint cimport INT64_MAX, UINT32_MAX, UINT64_MAX, int64_t, uint8_t, uint32_t, uint64_t
from libc.stdlib cimport free, malloc, realloc
from libc.string cimport memcpy, memset

from datastreamer._entry cimport (
    CROSSING, EMPTY_PAGE, FOREIGN, HEAD_SIZE, HEADER_PAGE_SIZE, LONG, MAX_BOOKMARK_SIZE,
    MAX_DATA_SIZE, NOTHING, NO_MEMORY, OUT_OF_SEQUENCE, PACKET_ENTRY, PADDING, PAGE_SIZE, PART,
    SHORT, TYPE_BOOKMARK, Verdict, WHOLE, get_u32, get_u64, judge, page_room, put_head,
)
from datastreamer._run cimport Run, resize_columns, scan_run
from datastreamer.selection._selection cimport MOST, Selection, free_selection, is_wanted, select_clauses

from datastreamer.errors import BadEntryType, CorruptEntries, EntryTooLarge
from datastreamer.selection.clauses import checked, normal

cdef enum:
    # A scan of fewer bytes keeps the GIL: it takes about 50 us, less than acquiring the GIL again
    # from a busy thread.
    UNLOCKED_FROM = 256 << 10


# Arguments

cdef uint64_t as_u64(object value, str what) except? 0xFFFFFFFFFFFFFFFF:
    try:
        return as_index(value)
    except OverflowError:
        raise ValueError(f"{what} is 0 to {UINT64_MAX}, not {value}") from None


cdef int refuse_type(object value) except -1:
    if value == TYPE_BOOKMARK:
        raise BadEntryType("entry type 0xb0 belongs to bookmarks; add them with add_bookmark")
    raise BadEntryType(f"an entry type is 0 to {UINT32_MAX}, not {value}")


cdef uint8_t as_packet(object value) except? 0xFF:
    cdef uint64_t packet = as_u64(value, "a packet type")
    if packet > 0xFF:
        raise ValueError(f"a packet type is one byte, not {value}")
    return <uint8_t>packet


cdef int64_t as_file_offset(object value) except -1:
    """A file offset at which data may be."""
    cdef uint64_t offset = as_u64(value, "a file offset")
    if not HEADER_PAGE_SIZE <= offset <= <uint64_t>INT64_MAX:
        raise ValueError(f"the file offset of data is {HEADER_PAGE_SIZE} to {INT64_MAX}, "
                         f"not {offset}")
    return <int64_t>offset


cdef Py_ssize_t span_end(Py_ssize_t size, Py_ssize_t start, object end) except -1:
    """The end of the span from `start` to `end` (None: the end of the buffer of `size` bytes)."""
    cdef Py_ssize_t stop = size if end is None else end
    if not 0 <= start <= stop <= size:
        raise ValueError(f"bytes {start} to {stop} are not a span of a buffer of {size} bytes")
    return stop


cdef int refuse_size(Py_ssize_t size, Py_ssize_t item=-1) except -1:
    where = "" if item < 0 else f" (item {item})"
    raise EntryTooLarge(f"an entry holds at most {MAX_DATA_SIZE:,} bytes of data, "
                        f"not {size:,}{where}")


cdef object corrupt(Verdict why, const uint8_t* base, Py_ssize_t at, Py_ssize_t room,
                    uint64_t due):
    """The exception for the bytes at `base + at`, which `judge` refused."""
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
        reason = f"entry length {get_u32(p + 1)} is above the maximum of {PAGE_SIZE} bytes"
    elif why == CROSSING:
        reason = f"the entry extends past the end of its page, which is {room} bytes away"
    elif why == OUT_OF_SEQUENCE and due == UINT64_MAX:
        reason = f"entry number {due} is due, and no entry can have it"
    elif why == OUT_OF_SEQUENCE:
        reason = f"entry number {get_u64(p + 9)} where {due} is due"
    else:
        reason = "the entry is not whole"
    return CorruptEntries(at, reason)


# Memory that Python sees

@cython.final
@cython.no_gc_clear
cdef class _Source:
    """A caller's buffer, exported as long as this object lives."""

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
    """A read-only array; `owner` keeps its memory alive."""

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


cdef void* column(Py_ssize_t count, size_t size) except NULL:
    """Memory for `count` items, which the caller frees."""
    cdef void* memory = malloc(count * size + 1)
    if memory == NULL:
        raise MemoryError
    return memory


cdef void* resized(void* memory, size_t size) except NULL:
    """`memory` with another size. If that raises, `memory` is unchanged."""
    cdef void* moved = realloc(memory, size)
    if moved == NULL:
        raise MemoryError
    return moved


cdef object view_of(object owner, const void* memory, Py_ssize_t count, Py_ssize_t itemsize,
                    const char* format):
    cdef _View view = _View.__new__(_View)
    view.owner = owner
    view.memory = memory if memory != NULL else <const char*>b""
    view.count = count
    view.itemsize = itemsize
    view.format = format
    return PyMemoryView_FromObject(view)


# Entries

@cython.final
@cython.freelist(256)
cdef class Entry:
    """Entry(number, type, data)\n--\n
    One entry: `number` (u64), `type` (u32) and `data` (bytes). Immutable.

    Raises `BadEntryType` if the type is not a u32, `EntryTooLarge` if the data is more than
    1,048,559 bytes, `ValueError` if the number is not a u64.
    """

    cdef readonly uint64_t number
    cdef readonly bytes data
    cdef readonly uint32_t type

    def __init__(self, number, type, bytes data not None):
        if self.data is not None:
            raise TypeError("an Entry is immutable")
        if len(data) > MAX_DATA_SIZE:
            refuse_size(len(data))
        self.number = as_u64(number, "an entry number")
        self.type = as_type(type)
        self.data = data

    @property
    def is_bookmark(self):
        """Whether its type is that of bookmarks (0xb0)."""
        return self.type == TYPE_BOOKMARK

    def pack(self, packet_type=PACKET_ENTRY):
        """Its bytes on disk and on the wire: a head of 17 bytes, then the data."""
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
    """The memory of the columns; a batch and its slices share it."""

    cdef int64_t* offsets
    cdef uint32_t* lengths
    cdef uint32_t* types
    cdef uint64_t* numbers

    def __dealloc__(self):
        free(self.numbers)
        free(self.offsets)
        free(self.lengths)
        free(self.types)


@cython.final
@cython.no_gc_clear
cdef class EntryBatch:
    """EntryBatch()\n--\n
    A run of whole entries in a buffer: the buffer, and a column for each of their fields.

    A sequence of `Entry` objects, each made on access; a slice is a batch on the same buffer
    and columns. The buffer stays exported while the batch, a slice of it or a view from it
    lives.

    A batch that `select` made has gaps: `first_number` and `next_number` are those of the
    batch that it was made of, and `numbers` has the number of each entry.

    `first_number` is the number of the first entry; without entries, the number that is due,
    or 0 if that is unknown. `next_number` follows that of the last entry. `start` and `end`
    are the span in the buffer; `end` is just past the last whole entry. What stopped a scan
    there (a slice does not have it): `more` is True if the beginning of another entry follows,
    which needs at least `needed` bytes after `end`: a head of 17 bytes, or the whole entry if
    its head is there. In a scan of wire bytes, `stopped_at` is the byte that begins no entry,
    else -1.
    """

    cdef _Source _source
    cdef _Columns _columns
    cdef const uint8_t* _bytes
    cdef const int64_t* _offsets
    cdef const uint32_t* _lengths
    cdef const uint32_t* _types
    cdef const uint64_t* _numbers  # NULL: consecutive
    cdef Py_ssize_t _count
    cdef Py_ssize_t _nbytes        # -1: not computed yet
    cdef readonly uint64_t first_number
    cdef readonly uint64_t next_number
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
    def offsets(self):
        """For each entry the offset of its 17-byte head in `base` (int64, read-only)."""
        return view_of(self._columns, self._offsets, self._count, sizeof(int64_t), b"q")

    @property
    def lengths(self):
        """For each entry the size of its data, without the head (uint32, read-only)."""
        return view_of(self._columns, self._lengths, self._count, sizeof(uint32_t), b"I")

    @property
    def types(self):
        """For each entry its type (uint32, read-only)."""
        return view_of(self._columns, self._types, self._count, sizeof(uint32_t), b"I")

    @property
    def numbers(self):
        """For each entry its number (uint64, read-only)."""
        cdef _Columns columns = self._columns
        cdef Py_ssize_t i
        if self._numbers != NULL or not self._count:
            return view_of(columns, self._numbers, self._count, sizeof(uint64_t), b"Q")
        columns = _Columns.__new__(_Columns)
        columns.numbers = <uint64_t*>column(self._count, sizeof(uint64_t))
        for i in range(self._count):
            columns.numbers[i] = self.first_number + <uint64_t>i
        return view_of(columns, columns.numbers, self._count, sizeof(uint64_t), b"Q")

    @property
    def nbytes(self):
        """The size of all entries, heads and data."""
        cdef Py_ssize_t i
        if self._nbytes < 0:
            self._nbytes = self._count * HEAD_SIZE
            for i in range(self._count):
                self._nbytes += self._lengths[i]
        return self._nbytes

    def data(self, index):
        """The data of the entry at `index`, as a read-only view of `base`."""
        cdef Py_ssize_t i = self._place(index)
        return view_of(self._source, self._bytes + self._offsets[i] + HEAD_SIZE,
                       self._lengths[i], 1, b"B")

    def count(self, type):
        """The number of entries of this type."""
        cdef uint32_t kind = as_type(type)
        cdef Py_ssize_t i, found = 0
        for i in range(self._count):
            found += self._types[i] == kind
        return found

    def select(self, where):
        """The entries that one of the clauses matches, with their numbers: a type, or a `Where`."""
        cdef tuple clauses = normal([checked(clause) for clause in where])
        cdef Py_ssize_t found = 0, at, i
        cdef Py_ssize_t* places = NULL
        cdef uint8_t* wanted = <uint8_t*>column(self._count, 1)
        cdef Selection selection
        try:
            places = <Py_ssize_t*>column(self._count, sizeof(Py_ssize_t))
            memset(wanted, 0, self._count)
            for at in range(0, len(clauses), MOST):
                select_clauses(&selection, clauses[at : at + MOST])
                for i in range(self._count):
                    wanted[i] |= is_wanted(&selection, self._types[i],
                                           self._bytes + self._offsets[i] + HEAD_SIZE,
                                           self._lengths[i], self._lengths[i])
                free_selection(&selection)
            for i in range(self._count):
                if wanted[i]:
                    places[found] = i
                    found += 1
            return self if found == self._count else self._pick(places, found)
        finally:
            free(wanted)
            free(places)

    def before(self, number):
        """The entries with a lower number. Raises `ValueError` if it is not a u64."""
        cdef uint64_t bound = as_u64(number, "an entry number")
        cdef EntryBatch part = self._slice(0, self._below(bound))
        part.first_number = self.first_number
        part.next_number = min(self.next_number, max(self.first_number, bound))
        return part

    def since(self, number):
        """The entries with this number or a higher one. Raises `ValueError` if it is not a
        u64."""
        cdef uint64_t bound = as_u64(number, "an entry number")
        cdef EntryBatch part = self._slice(self._below(bound), self._count)
        part.first_number = max(self.first_number, min(self.next_number, bound))
        part.next_number = self.next_number
        return part

    cdef Py_ssize_t _below(self, uint64_t number) noexcept:
        """The number of entries with a lower number."""
        cdef Py_ssize_t low = 0, high = self._count, middle
        while low < high:
            middle = (low + high) >> 1
            if self._number(middle) < number:
                low = middle + 1
            else:
                high = middle
        return low

    def bookmarks(self):
        """(key, number) of each bookmark with a valid key, of 1 to 16 bytes."""
        cdef list found = []
        cdef Py_ssize_t i
        for i in range(self._count):
            if self._types[i] == TYPE_BOOKMARK and 1 <= self._lengths[i] <= MAX_BOOKMARK_SIZE:
                found.append((
                    PyBytes_FromStringAndSize(
                        <const char*>self._bytes + self._offsets[i] + HEAD_SIZE, self._lengths[i]),
                    self._number(i),
                ))
        return found

    def packed(self):
        """The entries' bytes as they are in `base`, joined, without padding."""
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

    cdef inline uint64_t _number(self, Py_ssize_t i) noexcept:
        return self.first_number + <uint64_t>i if self._numbers == NULL else self._numbers[i]

    cdef EntryBatch _pick(self, const Py_ssize_t* places, Py_ssize_t count):
        """The entries at these indexes, in columns of their own."""
        cdef EntryBatch part
        cdef _Columns columns = _Columns.__new__(_Columns)
        cdef Py_ssize_t i
        columns.offsets = <int64_t*>column(count, sizeof(int64_t))
        columns.lengths = <uint32_t*>column(count, sizeof(uint32_t))
        columns.types = <uint32_t*>column(count, sizeof(uint32_t))
        columns.numbers = <uint64_t*>column(count, sizeof(uint64_t))
        for i in range(count):
            columns.offsets[i] = self._offsets[places[i]]
            columns.lengths[i] = self._lengths[places[i]]
            columns.types[i] = self._types[places[i]]
            columns.numbers[i] = self._number(places[i])
        part = batch_of(self._source, columns, count, self.first_number, self.next_number)
        part.start, part.end = self.start, self.end
        return part

    cdef inline Entry _entry(self, Py_ssize_t i):
        return new_entry(self._number(i), self._types[i],
                         self._bytes + self._offsets[i] + HEAD_SIZE, self._lengths[i])

    cdef EntryBatch _slice(self, Py_ssize_t start, Py_ssize_t stop):
        cdef EntryBatch part = EntryBatch.__new__(EntryBatch)
        part._source = self._source
        part._columns = self._columns
        part._bytes = self._bytes
        part._count = stop - start
        part._nbytes = -1
        part.first_number = self.first_number
        part.next_number = self.next_number
        if self._numbers == NULL and self._count:
            part.first_number += <uint64_t>start
            part.next_number = self.first_number + <uint64_t>stop
        else:
            if start:
                part.first_number = (
                    self._numbers[start] if start < self._count else self.next_number)
            if stop < self._count:
                part.next_number = self._numbers[stop] if stop else self.first_number
        part.stopped_at = -1
        part.start = self._offsets[start] if start < self._count else self.end
        part.end = part.start
        if part._count:
            part._offsets = self._offsets + start
            part._lengths = self._lengths + start
            part._types = self._types + start
            if self._numbers != NULL:
                part._numbers = self._numbers + start
            part.end = self._offsets[stop - 1] + HEAD_SIZE + <Py_ssize_t>self._lengths[stop - 1]
        return part


cdef EntryBatch batch_of(_Source source, _Columns columns, Py_ssize_t count, uint64_t first,
                         uint64_t following):
    """The entries of these columns, which are in the source; the caller sets `start` and `end`."""
    cdef EntryBatch batch = EntryBatch.__new__(EntryBatch)
    batch._source, batch._columns = source, columns
    batch._bytes = <const uint8_t*>source.view.buf
    batch._offsets, batch._lengths = columns.offsets, columns.lengths
    batch._types, batch._numbers = columns.types, columns.numbers
    batch._count, batch._nbytes, batch.stopped_at = count, -1, -1
    batch.first_number, batch.next_number = first, following
    return batch


cdef int columns_of(object batch, BatchColumns* columns) except -1:
    if not isinstance(batch, EntryBatch):
        raise TypeError(f"expected an EntryBatch, not {type(batch).__name__}")
    columns.base = (<EntryBatch>batch)._bytes
    columns.offsets = (<EntryBatch>batch)._offsets
    columns.lengths = (<EntryBatch>batch)._lengths
    columns.types = (<EntryBatch>batch)._types
    columns.numbers = (<EntryBatch>batch)._numbers
    columns.first_number = (<EntryBatch>batch).first_number
    columns.count = (<EntryBatch>batch)._count
    return 0


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


def scan(buffer, first_number=None, *, Py_ssize_t start=0, end=None, file_offset=None):
    """Find the whole entries in bytes `start` to `end` of `buffer`, in one pass.

    `first_number` is the number that is due (None: that of the first entry); numbers are
    consecutive.

    Without `file_offset` the bytes come from a wire: entries without padding, and the run ends
    at a byte that begins no entry (`EntryBatch.stopped_at`). `file_offset` is that of
    `buffer[start]` if the bytes come from a stream file: padding is skipped to the next page,
    and a page must begin with an entry. An incomplete last entry is not damage
    (`EntryBatch.more`); a head is checked once all of it is there.

    Raises `CorruptEntries` with the offset in `buffer`: a length below 17 or above 1 MiB, a
    number out of sequence and, in a file, another packet type, an entry that extends past the
    end of its page, or a page that begins with padding. Raises `ValueError` for an impossible
    span, number or offset.

    Releases the GIL for 256 KiB or more: no thread may change the bytes meanwhile.
    """
    cdef _Source source = hold(buffer)
    cdef _Columns columns = _Columns.__new__(_Columns)
    cdef EntryBatch batch
    cdef Run run
    cdef Verdict verdict
    run.base = <const uint8_t*>source.view.buf
    run.at = run.last_end = start
    run.end = span_end(source.view.len, start, end)
    run.paged = file_offset is not None
    run.room = page_room(as_file_offset(file_offset)) if run.paged else UNBOUNDED
    run.number_known = first_number is not None
    run.number = as_u64(first_number, "first_number") if run.number_known else 0
    run.length = 0
    run.offsets = NULL
    run.lengths = run.types = NULL
    run.count = run.capacity = run.nbytes = 0
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
    if not (verdict in (NOTHING, PART)
            or (not run.paged and verdict in (PADDING, FOREIGN))):
        raise corrupt(verdict, run.base, run.at, run.room, run.number)

    batch = batch_of(source, columns, run.count, run.number - <uint64_t>run.count, run.number)
    batch._nbytes = run.nbytes
    batch.start, batch.end = start, run.last_end
    batch.more = verdict == PART
    batch.needed = run.at - run.last_end + run.length if verdict == PART else 0
    batch.stopped_at = run.base[run.at] if verdict in (PADDING, FOREIGN) else -1
    return batch


def scan_chosen(buffer, first_number, next_number, *, Py_ssize_t start, Py_ssize_t end):
    """The entries in bytes `start` to `end` of `buffer`, as a batch with gaps. They came from a
    wire, and are a selection of those from `first_number` up to `next_number`.

    Raises `CorruptEntries`, with the offset in `buffer`, as `scan`; also for numbers that do not
    rise or are out of the range, and for an entry that is not whole. Raises `ValueError` for an
    impossible span or number.
    """
    cdef _Source source = hold(buffer)
    cdef _Columns columns = _Columns.__new__(_Columns)
    cdef EntryBatch batch
    cdef Verdict verdict
    cdef const uint8_t* base = <const uint8_t*>source.view.buf
    cdef uint64_t due = as_u64(first_number, "an entry number")
    cdef uint64_t bound = as_u64(next_number, "an entry number")
    cdef uint64_t number
    cdef Py_ssize_t at = start, count = 0, capacity = 0
    cdef Py_ssize_t stop = span_end(source.view.len, start, end)
    cdef uint32_t length = 0
    while at < stop:
        number = get_u64(base + at + 9) if stop - at >= HEAD_SIZE else due
        verdict = judge(base + at, stop - at, UNBOUNDED, number, &length)
        if verdict != WHOLE:
            raise corrupt(verdict, base, at, UNBOUNDED, number)
        if not due <= number < bound:
            raise CorruptEntries(at, f"entry number {number} where one of {due} to "
                                     f"{bound}, excluded, is due")
        if count == capacity:
            capacity = 2 * capacity + min(64, (stop - at) // HEAD_SIZE + 1)
            columns.offsets = <int64_t*>resized(columns.offsets, capacity * sizeof(int64_t))
            columns.lengths = <uint32_t*>resized(columns.lengths, capacity * sizeof(uint32_t))
            columns.types = <uint32_t*>resized(columns.types, capacity * sizeof(uint32_t))
            columns.numbers = <uint64_t*>resized(columns.numbers, capacity * sizeof(uint64_t))
        columns.offsets[count] = at
        columns.lengths[count] = length - HEAD_SIZE
        columns.types[count] = get_u32(base + at + 5)
        columns.numbers[count] = number
        count += 1
        at += length
        due = number + 1
    batch = batch_of(source, columns, count, as_u64(first_number, "an entry number"), bound)
    batch._nbytes = stop - start
    batch.start, batch.end = start, stop
    return batch


# Packing

def pack_entry(number, type, data, packet_type=PACKET_ENTRY):
    """One entry's bytes: a head of 17 bytes, then the data.

    Raises `BadEntryType` if `type` is not a u32 (that of bookmarks is accepted), `EntryTooLarge`,
    and `ValueError` if the number is not a u64 or the packet type is not a byte.
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
