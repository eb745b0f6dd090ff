"""All writes of a commit in one call that releases the GIL once, and the descriptor they go to.

Decides nothing; `storage/write/_stream_end.pyx` has the bytes of the header page.
"""

from cpython.object cimport PyObject
from libc.errno cimport EINTR, errno
from libc.stdint cimport uint8_t, uint64_t
from libc.stdlib cimport free
from posix.unistd cimport write

from datastreamer._codec cimport column
from datastreamer._packer cimport Packed, segment_end
from datastreamer.storage.disk._placement cimport Piece, write_all, write_pieces

import os

from datastreamer.storage.disk._placement import Placement, Placer

cdef extern from *:
    """
    #include <unistd.h>
    #if defined(__APPLE__)
    #include <fcntl.h>
    /* fsync does not flush the drive's cache there. */
    static int to_disk(int fd) { return fcntl(fd, F_FULLFSYNC); }
    #else
    static int to_disk(int fd) { return fdatasync(fd); }
    #endif
    """
    int to_disk(int fd) noexcept nogil

cdef extern from "Python.h":
    bint PyMethod_Check(object) noexcept
    # These return borrowed references.
    PyObject* PyMethod_GET_FUNCTION(object) noexcept
    PyObject* PyMethod_GET_SELF(object) noexcept

cdef enum:
    FEW = 8  # up to this number, pieces and wakers are on the stack


cdef struct Plan:
    # What a commit writes, from the caller's memory.
    const char* arena
    Piece* pieces
    Py_ssize_t count
    const char* page
    Span before
    Span after
    bint sync
    uint64_t sync_ns    # the duration of a sync that succeeded
    int* wakers
    Py_ssize_t waker_count


class EntriesNotWritten(OSError):
    """The write of a commit's entries failed; the header was not written."""


cdef int sync_data(int fd) noexcept nogil:
    while to_disk(fd) < 0:
        if errno != EINTR:
            return errno
    return 0


cdef int carry_out(int fd, Plan* plan, bint* entries_written) noexcept nogil:
    """Execute the plan; 0, or the errno of the step that failed."""
    cdef Py_ssize_t i
    cdef int failed
    cdef uint64_t one = 1
    cdef uint64_t began
    failed = write_pieces(fd, plan.arena, plan.pieces, plan.count)
    entries_written[0] = not failed
    if failed:
        return failed
    failed = write_all(fd, plan.page + plan.before.start, plan.before.end - plan.before.start,
                       plan.before.start)
    if failed:
        return failed
    if plan.sync:
        began = now_ns()
        failed = sync_data(fd)
        if failed:
            return failed
        plan.sync_ns = now_ns() - began
    failed = write_all(fd, plan.page + plan.after.start, plan.after.end - plan.after.start,
                       plan.after.start)
    if failed:
        return failed
    for i in range(plan.waker_count):
        while write(plan.wakers[i], &one, 8) < 0 and errno == EINTR:
            pass
    return 0


cdef class Descriptor:
    """The operations of a file that are compiled; `file_ops.OsFile` has the others."""

    def __init__(self, int fd):
        self._fd = fd

    def commit(self, Packed packed not None, page, before, after, bint sync, wakers):
        """Write an operation and make it visible, in this order: the packed entries;
        `page[before]` at the same offsets in the file; if `sync`, one fdatasync; `page[after]`;
        8 bytes to each descriptor of `wakers` (one that is full is awake already). `before` and
        `after` are (start, end) in bytes.

        Raises `EntriesNotWritten` if an entry could not be written, and `OSError` for a later
        step; the steps after that one were not begun.
        """
        cdef const uint8_t[::1] view = page
        cdef Span first, last
        cdef uint64_t sync_ns = 0
        first.start, first.end = before
        last.start, last.end = after
        if not (0 <= first.start <= first.end <= view.shape[0]
                and 0 <= last.start <= last.end <= view.shape[0]):
            raise ValueError("a span is outside the page")
        write_packed(self._fd, packed, <const char*>&view[0], first, last, sync, wakers, &sync_ns)

    def place(self, arena, segments):
        """Start to write the segments, (file offset, start in `arena`, length) in a thread, after earlier ones."""
        if self._placer is None or not self._placer.runs():
            self._placer = Placer()
        return Placement(self._fd, arena, segments, self._placer)


cdef PyObject* ITS_COMMIT = <PyObject*>Descriptor.commit


cdef Descriptor descriptor_of(file):
    """The file, if `write_packed` may take the place of its `commit`; None otherwise."""
    commit = file.commit
    if PyMethod_Check(commit) and PyMethod_GET_FUNCTION(commit) == ITS_COMMIT:
        return <Descriptor>PyMethod_GET_SELF(commit)
    return None


cdef int write_packed(int fd, Packed packed, const char* page, Span before, Span after,
                      bint sync, wakers, uint64_t* sync_ns) except -1:
    """As `Descriptor.commit`. Sets `sync_ns` to the duration of the sync."""
    cdef Piece[FEW] few
    cdef int[FEW] few_wakers
    cdef Plan plan
    cdef Py_ssize_t i
    cdef int failed
    cdef bint entries_written
    arena = packed._arena
    plan.arena = <const char*>arena.memory
    plan.count = packed._count
    plan.page = page
    plan.before = before
    plan.after = after
    plan.sync = sync
    plan.sync_ns = 0
    plan.pieces = few
    plan.wakers = few_wakers
    plan.waker_count = len(wakers)
    # As an export: the memory does not move while another thread adds entries.
    arena.exports += 1
    try:
        if plan.count > FEW:
            plan.pieces = <Piece*>column(plan.count, sizeof(Piece))
        if plan.waker_count > FEW:
            plan.wakers = <int*>column(plan.waker_count, sizeof(int))
        for i in range(plan.count):
            plan.pieces[i].offset = packed._segments[i].file_offset
            plan.pieces[i].start = packed._segments[i].begin
            plan.pieces[i].length = segment_end(packed, i) - packed._segments[i].begin
        for i in range(plan.waker_count):
            plan.wakers[i] = wakers[i]
        with nogil:
            failed = carry_out(fd, &plan, &entries_written)
    finally:
        arena.exports -= 1
        if plan.pieces != few:
            free(plan.pieces)
        if plan.wakers != few_wakers:
            free(plan.wakers)
    if failed:
        raise (OSError if entries_written else EntriesNotWritten)(failed, os.strerror(failed))
    sync_ns[0] = plan.sync_ns
    return 0
