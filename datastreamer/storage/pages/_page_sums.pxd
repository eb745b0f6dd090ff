"""The running hashes of a stream's end, as `storage/write/_stream_end.pyx` advances them in C."""

cimport cython
from libc.stdint cimport int64_t


@cython.final
cdef class PageSums:

    cdef int64_t _page          # the last page
    cdef int64_t _page_end      # the offset at which it ends
    cdef int64_t _end           # where its entries end
    cdef bytes _chain
    cdef int64_t _chained_from
    cdef object _tail           # the xxh3 of its entries
    cdef list _finished

    cdef _finish(self, next_number)
