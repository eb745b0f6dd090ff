"""One pass over many sockets that releases the GIL once.

Knows descriptors and bytes, not clients.
"""

from cpython.buffer cimport PyBUF_SIMPLE, PyBuffer_Release, PyObject_GetBuffer
from libc.errno cimport EINTR, errno
from libc.stdint cimport int64_t
from libc.stdlib cimport free, malloc

cdef extern from *:
    """
    #include <sys/socket.h>
    #include <time.h>
    #ifndef MSG_NOSIGNAL
    #define MSG_NOSIGNAL 0  /* macOS: SO_NOSIGPIPE, and Python ignores the signal anyway */
    #endif
    static long long now_ns(void) {
        struct timespec t;
        clock_gettime(CLOCK_MONOTONIC, &t);
        return (long long)t.tv_sec * 1000000000LL + t.tv_nsec;
    }
    """
    ssize_t send(int fd, const void* data, size_t size, int flags) nogil
    int MSG_DONTWAIT
    int MSG_NOSIGNAL
    int64_t now_ns() nogil

# Number of sends between two looks at the clock: some 50 us.
cdef Py_ssize_t CLOCK_EVERY = 8


def fan_out(fds, data, int64_t budget_ns):
    """Send `data` to each socket of `fds` without waiting.

    Returns a list with the result of each: the number of bytes sent, or minus an errno. The list
    is shorter than `fds` if `budget_ns` has run out; at least one socket is always served.
    """
    cdef Py_ssize_t count = len(fds), i, done = 0
    cdef Py_buffer view
    cdef ssize_t sent
    cdef int64_t until
    cdef int* sockets = <int*>malloc((count + 1) * sizeof(int))
    cdef int64_t* results = <int64_t*>malloc((count + 1) * sizeof(int64_t))
    if sockets == NULL or results == NULL:
        free(sockets)
        free(results)
        raise MemoryError
    try:
        for i in range(count):
            sockets[i] = fds[i]
        PyObject_GetBuffer(data, &view, PyBUF_SIMPLE)
        try:
            with nogil:
                until = now_ns() + budget_ns
                while done < count:
                    sent = send(sockets[done], view.buf, <size_t>view.len,
                                MSG_DONTWAIT | MSG_NOSIGNAL)
                    if sent < 0 and errno == EINTR:
                        continue
                    results[done] = sent if sent >= 0 else -errno
                    done += 1
                    if done % CLOCK_EVERY == 0 and now_ns() > until:
                        break
        finally:
            PyBuffer_Release(&view)
        return [results[i] for i in range(done)]
    finally:
        free(sockets)
        free(results)
