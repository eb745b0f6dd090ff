"""Packed entries, as a commit reads them in C: an arena and its segments."""

cimport cython
from libc.stdint cimport int64_t, uint8_t, uint64_t

cdef struct Segment:
    int64_t file_offset
    Py_ssize_t begin        # in the arena
    bint padded             # its last byte is a padding mark


@cython.final
cdef class Arena:
    """Memory for packed bytes. While it is exported it neither moves nor changes."""

    cdef uint8_t* memory
    cdef Py_ssize_t size
    cdef Py_ssize_t used       # the size of the next export
    cdef Py_ssize_t exports


cdef class Packed:
    """Packed entries and their file offsets; only `EntryPacker` subclasses it."""

    cdef Arena _arena
    cdef uint8_t* _bytes          # the arena's memory
    cdef Py_ssize_t _size         # of the arena's memory
    cdef Py_ssize_t _used
    cdef Segment* _segments
    cdef Py_ssize_t _count
    cdef Py_ssize_t _capacity
    cdef int64_t _offset          # of the next byte, in the file
    cdef uint64_t _number
    cdef list _bookmarks          # as `EntryPacker.bookmarks`
    cdef bint _open               # whether an operation is open


# Of an `EntryPacker`, which is given as what it inherits from.
cdef int begin_operation(Packed packed, int64_t offset, uint64_t number) except -1
cdef object add_event(Packed packed, object type, object data)
cdef object add_mark(Packed packed, object key)


cdef inline Py_ssize_t segment_end(Packed packed, Py_ssize_t i) noexcept:
    return packed._used if i + 1 == packed._count else packed._segments[i + 1].begin
