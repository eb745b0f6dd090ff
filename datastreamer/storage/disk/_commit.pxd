"""The writes of a commit, and the clocks of a writer."""

from libc.stdint cimport int64_t, uint64_t

from datastreamer._packer cimport Packed

cdef extern from *:
    """
    #include <stdint.h>
    #include <time.h>
    /* At most some milliseconds late, and five times as fast. */
    #if defined(CLOCK_MONOTONIC_COARSE)
    #define COARSE_CLOCK CLOCK_MONOTONIC_COARSE
    #elif defined(CLOCK_MONOTONIC_RAW_APPROX)
    #define COARSE_CLOCK CLOCK_MONOTONIC_RAW_APPROX
    #else
    #define COARSE_CLOCK CLOCK_MONOTONIC
    #endif
    static inline uint64_t coarse_ns(void) {
        struct timespec t;
        clock_gettime(COARSE_CLOCK, &t);
        return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
    }
    static inline uint64_t unix_ms(void) {
        struct timespec t;
        clock_gettime(CLOCK_REALTIME, &t);
        return (uint64_t)t.tv_sec * 1000u + (uint64_t)t.tv_nsec / 1000000u;
    }
    static inline uint64_t now_ns(void) {
        struct timespec t;
        clock_gettime(CLOCK_MONOTONIC, &t);
        return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
    }
    """
    uint64_t now_ns() noexcept nogil
    uint64_t coarse_ns() noexcept nogil
    uint64_t unix_ms() noexcept nogil

cdef struct Span:
    int64_t start
    int64_t end


cdef class Descriptor:
    cdef public int _fd
    # Made by the first `place`.
    cdef public object _placer


cdef Descriptor descriptor_of(file)
cdef int write_packed(int fd, Packed packed, const char* page, Span before, Span after,
                      bint sync, wakers, uint64_t* sync_ns) except -1
