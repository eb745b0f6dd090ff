"""Writes packed bytes to their place in a file, in a thread that needs no GIL.

Owns that thread, and keeps the memory that it writes. Knows a descriptor and offsets;
`uncommitted.py` decides what is written where.
"""

cimport cython
from cpython.buffer cimport PyBUF_SIMPLE, PyBuffer_Release, PyObject_GetBuffer
from cpython.pythread cimport (
    WAIT_LOCK, PyThread_acquire_lock, PyThread_allocate_lock, PyThread_free_lock,
    PyThread_release_lock, PyThread_type_lock,
)
from libc.errno cimport EINTR, ENOSPC, errno
from libc.stdint cimport int64_t
from libc.stdlib cimport free, malloc
from posix.signal cimport sigdelset, sigfillset, sigset_t
from posix.types cimport off_t, pid_t
from posix.unistd cimport getpid, pwrite

import os

cdef extern from "<signal.h>":
    enum: SIG_SETMASK, SIGSEGV, SIGBUS, SIGABRT
    int pthread_sigmask(int how, const sigset_t* new, sigset_t* old) noexcept

cdef extern from "Python.h":
    unsigned long PyThread_start_new_thread(void (*)(void*) noexcept nogil, void*) noexcept
    unsigned long PYTHREAD_INVALID_THREAD_ID


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
            return ENOSPC  # a regular file accepts no bytes only if the disk is full
        data += done
        offset += done
        length -= done
    return 0


cdef int write_pieces(int fd, const char* arena, const Piece* pieces,
                      Py_ssize_t count) noexcept nogil:
    """Write each piece; 0, or the errno of the write that failed."""
    cdef Py_ssize_t i
    cdef int failed
    for i in range(count):
        failed = write_all(fd, arena + pieces[i].start, pieces[i].length, pieces[i].offset)
        if failed:
            return failed
    return 0


cdef Piece* pieces_of(segments, Py_ssize_t size) except NULL:
    """The `segments` (file offset, start, length), checked to be within the `size` bytes of an
    arena, in memory that the caller frees. Raises `ValueError`."""
    cdef Py_ssize_t i, count = len(segments)
    cdef int64_t offset, start, length
    cdef Piece* pieces = <Piece*>malloc((count + 1) * sizeof(Piece))
    if pieces == NULL:
        raise MemoryError
    try:
        for i in range(count):
            offset, start, length = segments[i]
            if start < 0 or length < 0 or offset < 0 or start > size - length:
                raise ValueError("a segment is outside the arena")
            pieces[i].offset = offset
            pieces[i].start = start
            pieces[i].length = length
    except BaseException:
        free(pieces)
        raise
    return pieces


cdef struct Job:
    int fd
    const char* arena
    Piece* pieces
    Py_ssize_t count
    int failed


cdef struct Hand:
    # What a thread works on.
    Job* job                    # NULL: the thread ends
    PyThread_type_lock due      # released when there is a job
    PyThread_type_lock done     # released when the job is done


cdef void carry_out(Job* job) noexcept nogil:
    job.failed = write_pieces(job.fd, job.arena, job.pieces, job.count)


cdef void work(void* argument) noexcept nogil:
    cdef Hand* hand = <Hand*>argument
    while True:
        PyThread_acquire_lock(hand.due, WAIT_LOCK)
        if hand.job == NULL:
            PyThread_release_lock(hand.done)
            return
        carry_out(hand.job)
        PyThread_release_lock(hand.done)


cdef unsigned long start_thread(Hand* hand) noexcept:
    """Start a thread that blocks all signals except those of its own faults: a signal that it
    received would not interrupt the main thread's wait, which would delay Ctrl-C."""
    cdef sigset_t all_signals, before
    cdef unsigned long started
    sigfillset(&all_signals)
    sigdelset(&all_signals, SIGSEGV)
    sigdelset(&all_signals, SIGBUS)
    sigdelset(&all_signals, SIGABRT)
    pthread_sigmask(SIG_SETMASK, &all_signals, &before)  # a new thread inherits it
    started = PyThread_start_new_thread(work, hand)
    pthread_sigmask(SIG_SETMASK, &before, NULL)
    return started


@cython.final
cdef class Placer:
    """A thread that executes one placement after another: waking it is faster than starting one.

    It sleeps in between, and ends with this object. It does not exist in the child of a fork.
    """

    cdef Hand _hand
    cdef pid_t _process         # that has the thread; 0: the system could not start one
    cdef bint _busy

    def __cinit__(self):
        hand = &self._hand
        hand.due = PyThread_allocate_lock()
        hand.done = PyThread_allocate_lock()
        if hand.due == NULL or hand.done == NULL:
            raise MemoryError
        PyThread_acquire_lock(hand.due, WAIT_LOCK)
        PyThread_acquire_lock(hand.done, WAIT_LOCK)
        if start_thread(hand) != PYTHREAD_INVALID_THREAD_ID:
            self._process = getpid()

    def __dealloc__(self):
        if self._process == getpid():
            self._begin(NULL)
            self._wait()
        if self._hand.due != NULL:
            PyThread_free_lock(self._hand.due)
        if self._hand.done != NULL:
            PyThread_free_lock(self._hand.done)

    @property
    def free(self):
        """Whether it can accept a placement."""
        return not self._busy and self._process == getpid()

    cdef void _begin(self, Job* job) noexcept:
        self._busy = True
        self._hand.job = job
        PyThread_release_lock(self._hand.due)

    cdef void _wait(self) noexcept:
        if self._process == getpid():
            with nogil:
                PyThread_acquire_lock(self._hand.done, WAIT_LOCK)
            self._busy = False


@cython.final
@cython.no_gc_clear  # the thread may still write the arena's memory
cdef class Placement:
    """Segments of an arena that a thread writes to their place, from the creation of this object.

    The arena is exported until `finish` or `drop` has returned. Deallocation, for example after a
    signal's exception, waits for the thread first. The child of a fork has no such thread, and
    waits for nothing. Not for use by several threads at once.
    """

    cdef Job _job
    cdef Py_buffer _arena
    cdef bint _held
    cdef Placer _placer     # None once it has finished

    def __cinit__(self, int fd, arena, segments, Placer placer=None):
        """`segments` are as those of `_commit.Descriptor.commit`. The `placer` writes them if it
        is free, else a new one. If the system cannot start a thread, they are written when this
        returns."""
        PyObject_GetBuffer(arena, &self._arena, PyBUF_SIMPLE)
        self._held = True
        job = &self._job
        job.fd = fd
        job.arena = <const char*>self._arena.buf
        job.count = len(segments)
        job.pieces = pieces_of(segments, self._arena.len)
        if placer is None or not placer.free:
            placer = Placer()
        if placer.free:
            self._placer = placer
            placer._begin(job)
        else:
            with nogil:
                carry_out(job)

    def __dealloc__(self):
        self._wait()
        self._release()
        free(self._job.pieces)

    cdef void _wait(self) noexcept:
        if self._placer is not None:
            self._placer._wait()
            self._placer = None

    cdef void _release(self) noexcept:
        if self._held:
            self._held = False
            PyBuffer_Release(&self._arena)

    def finish(self):
        """Wait until all is written. If the thread's write failed, this call and each later one
        write again, and raise `OSError` if that fails too."""
        cdef Job* job = &self._job
        self._wait()
        if job.failed:
            with nogil:
                carry_out(job)
            if job.failed:
                raise OSError(job.failed, os.strerror(job.failed))
        self._release()

    def drop(self):
        """Wait until the thread has ended its writes, and ignore their errors."""
        self._wait()
        self._job.failed = 0
        self._release()
