"""Finds the entries of one page: by a walk from one to the next, or from a point of its table.

Makes no columns and no objects; `_codec.pyx` does. Knows bytes; must not know files, sockets or
clocks: the caller reads the file.
"""

cimport cython
from cpython.buffer cimport PyBUF_SIMPLE, PyBuffer_Release, PyObject_GetBuffer
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from cpython.pyport cimport PY_SSIZE_T_MAX as UNBOUNDED
from libc.stdint cimport INT64_MAX, UINT64_MAX, int64_t, uint8_t, uint32_t, uint64_t
from libc.stdlib cimport free, realloc
from libc.string cimport memcmp, memcpy

from datastreamer._codec cimport as_file_offset, as_packet, as_u64, corrupt, span_end
from datastreamer._entry cimport (
    HEAD_SIZE, NOTHING, PADDING, PAGE_SIZE, PART, TYPE_BOOKMARK, Verdict, WHOLE, get_u32, page_room,
)
from datastreamer._run cimport step_over

from datastreamer.errors import CorruptEntries

cdef enum:
    # Maximum number of entries, and of bytes, between two points of a page table.
    POINT_ENTRIES = 16
    POINT_BYTES = 2 << 10


def walk(buffer, number, *, end=None, file_offset, max_entries=None):
    """Walk over the whole entries of one page; returns where the last ends, as an offset in
    `buffer`, and the number after it.

    `buffer` begins with entry `number`, at `file_offset` of the file. Stops at padding, at the
    end of the page, at `end`, at an entry that is not whole, or after `max_entries`. Raises as
    `scan`.
    """
    cdef Py_buffer view
    cdef uint64_t due = as_u64(number, "an entry number")
    cdef uint64_t left = UINT64_MAX
    cdef Py_ssize_t room = page_room(as_file_offset(file_offset))
    cdef Py_ssize_t at = 0, stop
    cdef uint32_t length = 0
    cdef Verdict verdict = WHOLE
    PyObject_GetBuffer(buffer, &view, PyBUF_SIMPLE)
    try:
        stop = span_end(view.len, 0, end)
        if max_entries is not None:
            left = as_u64(max_entries, "max_entries")
        while verdict == WHOLE and room and left:
            left -= 1
            verdict = step_over(<const uint8_t*>view.buf, &at, stop, &room, &due, &length)
        if verdict not in (WHOLE, NOTHING, PART, PADDING):
            raise corrupt(verdict, <const uint8_t*>view.buf, at, room, due)
    finally:
        PyBuffer_Release(&view)
    return at, due


def entry_at(buffer, number, *, start_number):
    """Find entry `number`; returns the offset of its head in `buffer`, the size of its data, and
    its type.

    `buffer` begins with entry `start_number` and has no padding before the entry. Raises
    `CorruptEntries` if the entries up to it are damaged or `buffer` ends before its end, and
    `ValueError` if `number` is less than `start_number`.
    """
    cdef Py_buffer view
    cdef uint64_t wanted = as_u64(number, "an entry number")
    cdef uint64_t due = as_u64(start_number, "an entry number")
    cdef Py_ssize_t at = 0, before = 0, room = UNBOUNDED
    cdef uint32_t length = 0, kind
    cdef Verdict verdict
    if wanted < due:
        raise ValueError(f"entry {wanted} precedes entry {due}, where the walk begins")
    PyObject_GetBuffer(buffer, &view, PyBUF_SIMPLE)
    try:
        while due <= wanted:
            before = at
            verdict = step_over(<const uint8_t*>view.buf, &at, view.len, &room, &due, &length)
            if verdict == NOTHING:
                raise CorruptEntries(at, f"the entries end before entry {wanted}")
            if verdict != WHOLE:
                raise corrupt(verdict, <const uint8_t*>view.buf, at, room, due)
        kind = get_u32(<const uint8_t*>view.buf + before + 5)
    finally:
        PyBuffer_Release(&view)
    return before, length - HEAD_SIZE, kind


cdef bytes packed_after(bytes prefix, uint8_t packet, const uint8_t* entry, uint32_t length):
    """`prefix`, and the entry with this packet type."""
    cdef Py_ssize_t size = PyBytes_GET_SIZE(prefix)
    cdef bytes found = PyBytes_FromStringAndSize(NULL, size + length)
    cdef uint8_t* to = <uint8_t*>PyBytes_AS_STRING(found)
    memcpy(to, PyBytes_AS_STRING(prefix), size)
    memcpy(to + size, entry, length)
    to[size] = packet
    return found


@cython.final
cdef class PageTable:
    """Places of the entries of one page: a point every 16 entries or 2 KiB, from its start.

    The page begins with entry `first_number`, at `page_file_offset`. The table begins empty;
    `extend` adds entries up to `next_number` (excluded), at file offset `end_offset`. `full`: the
    page has no entry after that. Each look-up sets `used`; the owner of the table may reset it.
    """

    def __cinit__(self, first_number, page_file_offset):
        self.page_file_offset = self.end_offset = as_file_offset(page_file_offset)
        if (page_room(self.page_file_offset) != PAGE_SIZE
                or self.page_file_offset > INT64_MAX - PAGE_SIZE):
            raise ValueError(f"no page begins at file offset {page_file_offset}")
        self.first_number = self.next_number = as_u64(first_number, "an entry number")

    def __dealloc__(self):
        free(self._points)

    @property
    def nbytes(self):
        """Its memory in bytes."""
        return PageTable.__basicsize__ + self._capacity * <Py_ssize_t>sizeof(Point)

    def extend(self, buffer, file_offset):
        """Add the page's whole entries in `buffer`; returns their number.

        `buffer` holds committed bytes of the file from `file_offset` on, which is not past
        `end_offset`. Raises as `scan`; the table is then unchanged.
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
            raise ValueError(f"the bytes begin at file offset {offset}, past the end of the table "
                             f"at {self.end_offset}")
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
                raise corrupt(verdict, <const uint8_t*>view.buf, at, room, due)
        finally:
            PyBuffer_Release(&view)
        index = <uint32_t>(due - self.next_number)
        self._count = count
        self.next_number = due
        self.end_offset = self.page_file_offset + in_page
        self.full = room == 0 or verdict == PADDING
        return index

    def find(self, number):
        """The nearest point at or before an entry: its file offset, the number of the entry
        there, and a file offset at or before which the wanted entry ends.

        Raises `IndexError` if the entry is not in the table.
        """
        cdef Place place = self.place_of(as_u64(number, "an entry number"))
        return place.offset, place.number, place.limit

    def read(self, number, read, bytes prefix not None, packet_type):
        """`prefix` and the packed entry with this packet type; None if the bytes in the file
        are not those that the table was made of.

        `read(size, file_offset)` returns bytes of the file, fewer only at its end. Raises
        `IndexError` if the entry is not in the table.
        """
        cdef uint64_t wanted = as_u64(number, "an entry number")
        cdef uint8_t packet = as_packet(packet_type)
        cdef Place place = self.place_of(wanted)
        cdef bytes near = read(place.limit - place.offset, place.offset)
        if near is None:
            raise TypeError("read() returned no bytes")
        return entry_in(<const uint8_t*>PyBytes_AS_STRING(near), PyBytes_GET_SIZE(near), place,
                        wanted, prefix, packet)

    cdef Place place_of(self, uint64_t wanted) except *:
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

    cdef Place place_of_event(self, uint64_t bookmark) except *:
        """As `place_of` a bookmark, up to the point after the next entry."""
        cdef Place place = self.place_of(bookmark)
        if bookmark + 1 < self.next_number:
            place.limit = self.place_of(bookmark + 1).limit
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


cdef bytes entry_in(const uint8_t* near, Py_ssize_t size, Place place, uint64_t wanted,
                    bytes prefix, uint8_t packet):
    """`prefix` and entry `wanted` with this packet type; None if the `size` bytes from the place on
    are not those that the table was made of."""
    cdef Py_ssize_t at = 0, before = 0, room = UNBOUNDED
    cdef uint32_t length = 0
    while place.number <= wanted:
        before = at
        if step_over(near, &at, size, &room, &place.number, &length) != WHOLE:
            return None
    return packed_after(prefix, packet, near + before, length)


cdef bytes event_in(const uint8_t* near, Py_ssize_t size, Place place, uint64_t bookmark, bytes key,
                    uint64_t total, bytes prefix, uint8_t packet):
    """As `entry_in`, of the first event after entry `bookmark`, which is the bookmark `key`. None
    also if it is not, and if there is no event in these bytes before entry `total`."""
    cdef Py_ssize_t at = 0, before, room = UNBOUNDED
    cdef uint32_t length = 0
    cdef bint is_bookmark
    cdef const uint8_t* p
    while True:
        before = at
        if step_over(near, &at, size, &room, &place.number, &length) != WHOLE:
            return None
        if place.number <= bookmark:
            continue
        p = near + before
        is_bookmark = get_u32(p + 5) == TYPE_BOOKMARK
        if place.number == bookmark + 1:
            if (not is_bookmark or <Py_ssize_t>length != HEAD_SIZE + PyBytes_GET_SIZE(key)
                    or memcmp(p + HEAD_SIZE, PyBytes_AS_STRING(key), length - HEAD_SIZE)):
                return None
        elif place.number > total:
            return None
        elif not is_bookmark:
            return packed_after(prefix, packet, p, length)
