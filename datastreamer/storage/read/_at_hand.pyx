"""Reads entries of pages that are in the page cache, in one call and without a wait for the disk.

Owns only the read: `reader.py` decides which entries are committed, its caller which pages are
resident.
"""

cimport cython
from cpython.list cimport PyList_GET_ITEM, PyList_GET_SIZE
from libc.errno cimport EOPNOTSUPP, errno
from libc.stdint cimport int64_t, uint8_t, uint64_t
from libc.stdlib cimport free, malloc
from posix.unistd cimport pread

from datastreamer._entry cimport HEADER_PAGE_SIZE, PAGE_SIZE
from datastreamer._pages cimport PageTable, Place, entry_in, event_in
from datastreamer.storage.disk._commit cimport Descriptor

cdef extern from *:
    """
    #ifndef _GNU_SOURCE
    #define _GNU_SOURCE
    #endif
    #include <errno.h>
    #include <sys/types.h>
    #include <sys/uio.h>
    /* What is in the page cache; fails with EOPNOTSUPP where the system does not offer that. */
    static ssize_t read_cached(int fd, void *to, size_t size, off_t offset) {
    #if defined(RWF_NOWAIT)
        struct iovec part = {to, size};
        return preadv2(fd, &part, 1, offset, RWF_NOWAIT);
    #else
        errno = EOPNOTSUPP;
        return -1;
    #endif
    }
    """
    Py_ssize_t read_cached(int fd, void* to, size_t size, int64_t offset) noexcept nogil

cdef enum:
    NEAR = 16 << 10  # bytes that are read to the stack
    WHOLE = 3  # as in `page_states.py`


@cython.final
cdef class ReadsAtHand:
    """ReadsAtHand(file, pages): reads a file of the operating system.

    `pages` is the file's register, which knows which pages are to be compared with their checksums
    before entries in them are used (None: no page is).
    """

    def __cinit__(self, Descriptor file not None, pages):
        self._file = file
        self._pages = pages

    cpdef bytes packed(self, list tables, uint64_t total, pages, uint64_t wanted, bytes prefix,
                       uint8_t packet, bytes key=None):
        """`prefix` and entry `wanted` with this packet type; with `key`, the first event after the
        entry, if that is the bookmark `key` and the event is near in the same page.

        `tables` are in the order of their entries; `pages` are file offsets of resident pages;
        `total` is the number of entries in the stream. None if a read of the page cache is not
        enough: the tables do not have the entry, its page is not resident or has to be compared
        first, or the file has other bytes than those that the table was made of.
        """
        cdef PageTable table = table_with(tables, wanted)
        cdef Place place
        cdef uint8_t[NEAR] few
        cdef uint8_t* near = few
        cdef Py_ssize_t size, got
        if (wanted >= total or table is None or table.page_file_offset not in pages
                or self._unverified(table)):
            return None
        place = table.place_of(wanted) if key is None else table.place_of_event(wanted)
        size = <Py_ssize_t>(place.limit - place.offset)
        if size > NEAR:
            near = <uint8_t*>malloc(size)
            if near == NULL:
                raise MemoryError
        try:
            got = self._read(near, size, place.offset)
            if got < 0:
                return None
            if key is None:
                return entry_in(near, got, place, wanted, prefix, packet)
            return event_in(near, got, place, wanted, key, total, prefix, packet)
        finally:
            if near != few:
                free(near)

    cdef bint _unverified(self, PageTable table) except -1:
        cdef int64_t page
        cdef bytearray states
        if self._pages is None:
            return False
        page = (table.page_file_offset - HEADER_PAGE_SIZE) // PAGE_SIZE
        states = self._pages.states
        if page < len(states) and states[page] >= WHOLE:
            return False
        return self._pages.needs(page)

    cdef Py_ssize_t _read(self, uint8_t* to, Py_ssize_t size, int64_t offset) except? -2:
        """Fewer than `size` bytes at the end of the file or of what is cached; -1 for none."""
        cdef int fd = self._file._fd
        # No other thread closes the file meanwhile: they need the GIL for it.
        cdef Py_ssize_t got = read_cached(fd, to, size, offset)
        if got < 0 and errno == EOPNOTSUPP:
            with nogil:
                got = pread(fd, to, size, offset)
            if self._file._fd != fd:
                return -1
        return got


cdef PageTable table_with(list tables, uint64_t number):
    """The table of an entry; None if there is none."""
    cdef Py_ssize_t low = 0, high = PyList_GET_SIZE(tables), middle
    cdef PageTable table
    while low < high:
        middle = (low + high) >> 1
        table = <PageTable?><object>PyList_GET_ITEM(tables, middle)
        if table.first_number <= number:
            low = middle + 1
        else:
            high = middle
    if not low:
        return None
    table = <PageTable>(<object>PyList_GET_ITEM(tables, low - 1))
    return table if number < table.next_number else None
