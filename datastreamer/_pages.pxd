"""The table of one page's entries, for C code that reads them itself."""

from libc.stdint cimport int64_t, uint8_t, uint32_t, uint64_t

cdef struct Point:
    uint32_t offset    # in the page
    uint32_t index     # of the entry in the page


cdef struct Place:
    int64_t offset     # in the file, of a point
    uint64_t number    # of the entry there
    int64_t limit      # in the file: the wanted entry ends at or before it


cdef class PageTable:
    cdef readonly uint64_t first_number
    cdef readonly uint64_t next_number
    cdef readonly int64_t page_file_offset
    cdef readonly int64_t end_offset
    cdef readonly bint full
    cdef public bint used
    cdef Point* _points
    cdef Py_ssize_t _count
    cdef Py_ssize_t _capacity

    cdef Place place_of(self, uint64_t wanted) except *
    cdef Place place_of_event(self, uint64_t bookmark) except *
    cdef int _grow(self) except -1


cdef bytes entry_in(const uint8_t* near, Py_ssize_t size, Place place, uint64_t wanted,
                    bytes prefix, uint8_t packet)
cdef bytes event_in(const uint8_t* near, Py_ssize_t size, Place place, uint64_t bookmark, bytes key,
                    uint64_t total, bytes prefix, uint8_t packet)
