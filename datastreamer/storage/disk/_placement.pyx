"""Packed bytes on their way to their place in a file, in a thread that needs no GIL.

Owns that thread, from its begin to its end, and the memory that it writes from. Knows a
descriptor and offsets; whether anybody may write there is `writer.py`'s to say.
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
            return ENOSPC  # a regular file takes nothing only when it is full
        data += done
        offset += done
        length -= done
    return 0


cdef int write_pieces(int fd, const char* arena, const Piece* pieces,
                      Py_ssize_t count) noexcept nogil:
    """The same, of each piece in turn."""
    cdef Py_ssize_t i
    cdef int failed
    for i in range(count):
        failed = write_all(fd, arena + pieces[i].start, pieces[i].length, pieces[i].offset)
        if failed:
            return failed
    return 0


cdef Piece* pieces_of(segments, Py_ssize_t size) except NULL:
    """What `segments` says, for whoever frees it: (file offset, start, length), all of them
    within the `size` bytes of an arena. Raises `ValueError`."""
    cdef Py_ssize_t i, count = len(segments)
    cdef int64_t offset, start, length
    cdef Piece* pieces = <Piece*>malloc((count + 1) * sizeof(Piece))
    if pieces == NULL:
        raise MemoryError
    try:
        for i in range(count):
            offset, start, length = segments[i]
            if start < 0 or length < 0 or offset < 0 or start > size - length:
                raise ValueError("a segment lies outside of the arena")
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
    # What a thread is told.
    Job* job                    # NULL: end
    PyThread_type_lock due      # held until there is something to do
    PyThread_type_lock done     # held until that is done


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
    """A thread that signals pass by, but for those of its own faults: one that it took would not
    end what the main thread waits for, and Ctrl-C would be noticed late."""
    cdef sigset_t all_signals, before
    cdef unsigned long started
    sigfillset(&all_signals)
    sigdelset(&all_signals, SIGSEGV)
    sigdelset(&all_signals, SIGBUS)
    sigdelset(&all_signals, SIGABRT)
    pthread_sigmask(SIG_SETMASK, &all_signals, &before)  # a new thread begins with it
    started = PyThread_start_new_thread(work, hand)
    pthread_sigmask(SIG_SETMASK, &before, NULL)
    return started


@cython.final
cdef class Placer:
    """A thread for one placement after another: to begin one takes longer than to tell it.

    It sleeps in between, and ends when this goes. In the child of a fork there is none.
    """

    cdef Hand _hand
    cdef pid_t _process         # whose thread it is; 0: the system gave none
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
        """Whether it may be told to do something."""
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
@cython.no_gc_clear  # a cleared arena would free what the thread writes from
cdef class Placement:
    """Segments of an arena that a thread writes to their place, from the moment this is made.

    The arena is exported until `finish` or `drop` has returned. What goes, as after a signal's
    exception, waits for its thread first: none writes on behind anybody's back. In the child of
    a fork there is no such thread, and nothing to wait for. One thread at a time.
    """

    cdef Job _job
    cdef Py_buffer _arena
    cdef bint _held
    cdef Placer _placer     # which may still write; None: none does

    def __cinit__(self, int fd, arena, segments, Placer placer=None):
        """`segments` as those of `_commit.write_commit`. It is the `placer` that writes, where
        that is free. Where the system gives no thread, all is written when this returns."""
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
        """Return when all is written. What the system refused the thread is written here once
        more, and again with each further call; raises `OSError` where it refuses that too."""
        cdef Job* job = &self._job
        self._wait()
        if job.failed:
            with nogil:
                carry_out(job)
            if job.failed:
                raise OSError(job.failed, os.strerror(job.failed))
        self._release()

    def drop(self):
        """Return when nothing is written any more, whatever became of it."""
        self._wait()
        self._job.failed = 0
        self._release()
