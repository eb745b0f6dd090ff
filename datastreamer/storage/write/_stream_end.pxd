"""The end of a stream that is open for writing, which the commit lane moves."""

from libc.stdint cimport int64_t, uint8_t, uint64_t

from datastreamer.storage.pages._page_sums cimport PageSums

cdef enum State:
    READY           # a commit that ends at or before `limit` needs no check
    CHECK           # a question is open: room, path, truncated bytes, policy
    WRITING         # a commit runs
    CHANGING        # a sync or a change of committed entries runs
    IN_DOUBT        # a header or sync failed; can be repaired while the file is open
    INTERRUPTED     # only another open can find out what was written
    CLOSED


cdef class StreamEnd:
    cdef public object written
    cdef public object base
    cdef public object mid
    cdef public object base_sum
    cdef public object mid_sum
    cdef public PageSums sums
    cdef public int64_t commits
    cdef public int64_t durable
    cdef public uint64_t sequence
    cdef State _state
    # When the last commit ended, in ns.
    cdef uint64_t _ended
    cdef object _file
    cdef type _head
    cdef object _page
    cdef uint8_t* _bytes
    cdef Py_buffer _hold
    cdef Py_buffer _counters

    cpdef all_on_disk(self, head)
    cpdef commit(self, packer, PageSums placed, seen, bint sync, wakers)
    cdef int _put(self, base, mid, after, base_sum, mid_sum, bytes chain, bytes tail,
                  seen) except -1
    cdef int _put_synced(self, head) except -1
