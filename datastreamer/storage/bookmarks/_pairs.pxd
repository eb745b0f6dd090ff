"""Pairs of key and entry number as `_blocks.pyx` packs them."""

cimport cython
from cpython.object cimport PyObject
from libc.stdint cimport uint8_t

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


cdef class Merged:
    """One run of several; see `_pairs.pyx`."""

    cdef list _runs
    # A heap of the runs that are not empty, the one with the smallest pair on top.
    cdef PyObject** _heap
    cdef Py_ssize_t _count

    cdef const Pair* next(self) noexcept
    cdef void _sink(self, Py_ssize_t at) noexcept
