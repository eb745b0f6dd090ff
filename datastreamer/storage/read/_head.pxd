"""The end that readers see, which the commit lane publishes."""

from libc.stdint cimport int64_t


cdef class SeenState:
    cdef readonly object head
    cdef readonly int64_t turn
    cdef readonly object pages


cdef class HeadCell:
    cdef readonly SeenState now

    cpdef publish(self, head)
