"""Pairs of key and entry number, as `_blocks.pyx` packs them and `_lane.pyx` reports them."""

cimport cython
from cpython.object cimport PyObject
from libc.stdint cimport uint8_t, uint64_t

from datastreamer._entry cimport MAX_BOOKMARK_SIZE

cdef enum:
    # The bytes that decide the order: the key, filled with zeros, then its length. So a key sorts
    # before all keys that start with it, as in `bytes` and LMDB.
    ORDER_SIZE = MAX_BOOKMARK_SIZE + 1
    SORTED_SIZE = ORDER_SIZE + 8

cdef struct Pair:
    uint8_t key[MAX_BOOKMARK_SIZE]
    uint8_t size
    uint8_t number[8]    # big-endian
    uint8_t filler[7]


@cython.final
cdef class Pairs:
    """A list of pairs; see `_pairs.pyx`."""

    cdef Pair* _pairs
    cdef Py_ssize_t _count
    cdef Py_ssize_t _capacity

    cdef int _reserve(self, Py_ssize_t more) except -1
    cdef int _put(self, const uint8_t* key, Py_ssize_t size, uint64_t number) except -1
    cdef Py_ssize_t _place(self, uint64_t number) except -1
    cdef Pairs _copy(self, Py_ssize_t start, Py_ssize_t stop)


cdef class ReportedBookmarks:
    """The bookmarks of the newest entries; see `_pairs.pyx`."""

    cdef public object end
    cdef public object synced
    cdef public bint unfinished
    cdef public dict newest
    cdef public Pairs waiting
    cdef bint _for_writer
    cdef Py_ssize_t _most, _enough
    # The methods of the lock that guards these fields.
    cdef object _acquire, _release

    cdef bint report(self, list bookmarks, uint64_t start, head, synced) except -1
    cpdef add(self, bookmarks, head)
    cpdef limit(self)


cdef class Merged:
    """One run of several; see `_pairs.pyx`."""

    cdef list _runs
    # A heap of the runs that are not empty, the one with the smallest pair on top.
    cdef PyObject** _heap
    cdef Py_ssize_t _count

    cdef const Pair* next(self) noexcept
    cdef void _sink(self, Py_ssize_t at) noexcept
