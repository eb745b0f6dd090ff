"""Look-ups at hand, for C code that answers queries."""


cdef class LookUpsAtHand:
    cdef object _trusted
    cdef object _builder
    cdef dict _memory
    cdef object _indexed
    cdef object _state
    cdef object _reading
    cdef object _in_index

    cpdef bint hold_at(self, state) except -1
    cpdef object newest(self, bytes key)
