"""Complete writes of pieces of an arena to a descriptor, which `_commit.pyx` uses too."""

from libc.stdint cimport int64_t


cdef struct Piece:
    int64_t offset      # in the file
    int64_t start       # in the arena
    int64_t length


cdef int write_all(int fd, const char* data, int64_t length, int64_t offset) noexcept nogil
cdef int write_pieces(int fd, const char* arena, const Piece* pieces,
                      Py_ssize_t count) noexcept nogil
cdef Piece* pieces_of(segments, Py_ssize_t size) except NULL
