"""Reads of resident entries, for C code that answers queries."""

from libc.stdint cimport int64_t, uint8_t, uint64_t

from datastreamer._pages cimport PageTable
from datastreamer.storage.disk._commit cimport Descriptor


cdef class ReadsAtHand:
    cdef Descriptor _file
    cdef object _pages

    cpdef bytes packed(self, list tables, uint64_t total, pages, uint64_t wanted, bytes prefix,
                       uint8_t packet, bytes key=*)
    cdef bint _unverified(self, PageTable table) except -1
    cdef Py_ssize_t _read(self, uint8_t* to, Py_ssize_t size, int64_t offset) except? -2
