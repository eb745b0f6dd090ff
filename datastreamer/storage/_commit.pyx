"""A commit's writes in one call that lets go of the GIL once.

Knows offsets and bytes, not what they mean.
"""

from cpython.buffer cimport PyBUF_SIMPLE, PyBuffer_Release, PyObject_GetBuffer
from libc.errno cimport EINTR, ENOSPC, errno
from libc.stdint cimport int64_t, uint64_t
from libc.stdlib cimport free, malloc
from posix.types cimport off_t
from posix.unistd cimport pwrite, write

import os

cdef extern from *:
    """
    #include <unistd.h>
    #if defined(__APPLE__)
    #include <fcntl.h>
    /* fsync leaves the drive's own cache alone there. */
    static int to_disk(int fd) { return fcntl(fd, F_FULLFSYNC); }
    #else
    static int to_disk(int fd) { return fdatasync(fd); }
    #endif
    """
    int to_disk(int fd) noexcept nogil

STEP_DATA = 0
STEP_HEADER = 1
STEP_SYNC = 2
STEP_MARK = 3

cdef struct Segment:
    int64_t offset
    int64_t start
    int64_t length


class CommitStepFailed(OSError):
    """A step of a commit failed; ``step`` says which (the STEP_ numbers)."""

    step = STEP_DATA


cdef int write_all(int fd, const char* data, int64_t length, int64_t offset) noexcept nogil:
    """0, or the errno of the write that failed."""
    cdef ssize_t done
    while length > 0:
        done = pwrite(fd, data, <size_t>length, <off_t>offset)
        if done < 0:
            if errno == EINTR:
                continue
            return errno
        if done == 0:
            return ENOSPC  # a regular file takes nothing only when it is full
        data += done
        offset += done
        length -= done
    return 0


cdef int sync_data(int fd) noexcept nogil:
    while to_disk(fd) < 0:
        if errno != EINTR:
            return errno
    return 0


def write_commit(int fd, arena, segments, page, before, after, bint sync, wakers):
    """Write an operation and make it known, in this order.

    Every segment (file offset, start in `arena`, length); then `page[before]` at its
    own place in the file; then, where `sync` is true, one fdatasync; then `page[after]`;
    then 8 bytes to each descriptor of `wakers` (a full one is awake already).
    `before` and `after` are (start, end) in bytes.

    Raises `CommitStepFailed`, an `OSError` whose `step` tells how far it came; the
    steps behind it were not begun.
    """
    cdef Py_buffer data
    cdef Py_buffer head
    cdef Py_ssize_t count = len(segments), i, waker_count = len(wakers)
    cdef int64_t before_start = before[0], before_end = before[1]
    cdef int64_t after_start = after[0], after_end = after[1]
    cdef int64_t offset, start, length
    cdef int failed = 0, step = 0
    cdef uint64_t one = 1
    cdef Segment* plan = NULL
    cdef int* fds = NULL
    PyObject_GetBuffer(arena, &data, PyBUF_SIMPLE)
    try:
        PyObject_GetBuffer(page, &head, PyBUF_SIMPLE)
    except BaseException:
        PyBuffer_Release(&data)
        raise
    try:
        if not (0 <= before_start <= before_end <= head.len
                and 0 <= after_start <= after_end <= head.len):
            raise ValueError("the spans lie outside of the page")
        plan = <Segment*>malloc((count + 1) * sizeof(Segment))
        fds = <int*>malloc((waker_count + 1) * sizeof(int))
        if plan == NULL or fds == NULL:
            raise MemoryError
        for i in range(count):
            offset, start, length = segments[i]
            if start < 0 or length < 0 or offset < 0 or start > data.len - length:
                raise ValueError("a segment lies outside of the arena")
            plan[i].offset = offset
            plan[i].start = start
            plan[i].length = length
        for i in range(waker_count):
            fds[i] = wakers[i]
        with nogil:
            for i in range(count):
                failed = write_all(fd, <const char*>data.buf + plan[i].start,
                                   plan[i].length, plan[i].offset)
                if failed:
                    break
            if not failed:
                step = 1
                failed = write_all(fd, <const char*>head.buf + before_start,
                                   before_end - before_start, before_start)
            if not failed and sync:
                step = 2
                failed = sync_data(fd)
            if not failed:
                step = 3
                failed = write_all(fd, <const char*>head.buf + after_start,
                                   after_end - after_start, after_start)
            if not failed:
                for i in range(waker_count):
                    while write(fds[i], &one, 8) < 0 and errno == EINTR:
                        pass
    finally:
        free(plan)
        free(fds)
        PyBuffer_Release(&data)
        PyBuffer_Release(&head)
    if failed:
        error = CommitStepFailed(failed, os.strerror(failed))
        error.step = step
        raise error
