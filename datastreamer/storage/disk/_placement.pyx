"""Writes packed bytes to their place in a file, in a thread that needs no GIL.

Owns that thread, and keeps the memory that it writes. Knows a descriptor and offsets;
`uncommitted.py` decides what is written where.
"""

cimport cython
from cpython.buffer cimport PyBUF_SIMPLE, PyBuffer_Release, PyObject_GetBuffer
from libc.errno cimport EINTR, ENOSPC, errno
from libc.stdint cimport int64_t
from libc.stdlib cimport free, malloc
from posix.types cimport off_t, pid_t
from posix.unistd cimport getpid, pwrite

from datastreamer.storage.disk._threads cimport (
    create_without_signals, pthread_cond_broadcast, pthread_cond_destroy, pthread_cond_init,
    pthread_cond_signal, pthread_cond_t, pthread_cond_wait, pthread_join, pthread_mutex_destroy,
    pthread_mutex_init, pthread_mutex_lock, pthread_mutex_t, pthread_mutex_unlock, pthread_t,
)

import os


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
    bint done
    Job* next


cdef struct Queue:
    # What a thread works on, without the job in progress.
    pthread_mutex_t guard
    pthread_cond_t due          # there is a job, or `closing`
    pthread_cond_t done         # a job is done
    Job* first
    Job* last
    bint closing


cdef void carry_out(Job* job) noexcept nogil:
    job.failed = write_pieces(job.fd, job.arena, job.pieces, job.count)


cdef void* work(void* argument) noexcept nogil:
    cdef Queue* queue = <Queue*>argument
    cdef Job* job
    pthread_mutex_lock(&queue.guard)
    while True:
        job = queue.first
        if job != NULL:
            queue.first = job.next
            pthread_mutex_unlock(&queue.guard)
            carry_out(job)
            pthread_mutex_lock(&queue.guard)
            job.done = True
            pthread_cond_broadcast(&queue.done)
        elif queue.closing:
            pthread_mutex_unlock(&queue.guard)
            return NULL
        else:
            pthread_cond_wait(&queue.due, &queue.guard)


@cython.final
cdef class Placer:
    """A thread that executes placements, one after another, in their order.

    It sleeps in between, and ends with this object. It does not exist in the child of a fork.
    """

    cdef Queue _queue
    cdef pthread_t _thread
    cdef pid_t _process         # that has the thread; 0: the system could not start one

    def __cinit__(self):
        pthread_mutex_init(&self._queue.guard, NULL)
        pthread_cond_init(&self._queue.due, NULL)
        pthread_cond_init(&self._queue.done, NULL)
        if not create_without_signals(&self._thread, work, &self._queue):
            self._process = getpid()

    def __dealloc__(self):
        if not self.runs():
            return  # a mutex that the thread held stays locked in the child of a fork
        pthread_mutex_lock(&self._queue.guard)
        self._queue.closing = True
        pthread_cond_signal(&self._queue.due)
        pthread_mutex_unlock(&self._queue.guard)
        with nogil:
            pthread_join(self._thread, NULL)
        pthread_mutex_destroy(&self._queue.guard)
        pthread_cond_destroy(&self._queue.due)
        pthread_cond_destroy(&self._queue.done)

    cpdef bint runs(self) noexcept:
        """Whether this process has the thread."""
        return self._process == getpid()

    cdef void begin(self, Job* job) noexcept:
        queue = &self._queue
        pthread_mutex_lock(&queue.guard)
        if queue.first == NULL:
            queue.first = job
            pthread_cond_signal(&queue.due)
        else:
            queue.last.next = job
        queue.last = job
        pthread_mutex_unlock(&queue.guard)

    cdef bint has_done(self, Job* job) noexcept:
        pthread_mutex_lock(&self._queue.guard)
        done = job.done
        pthread_mutex_unlock(&self._queue.guard)
        return done

    cdef void wait(self, Job* job) noexcept:
        queue = &self._queue
        with nogil:
            pthread_mutex_lock(&queue.guard)
            while not job.done:
                pthread_cond_wait(&queue.done, &queue.guard)
            pthread_mutex_unlock(&queue.guard)


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
        """`segments` are (file offset, start in `arena`, length). The `placer` writes them after
        its earlier placements, or a new one if this process does not have its thread. If the
        system cannot start a thread, they are written when this returns."""
        PyObject_GetBuffer(arena, &self._arena, PyBUF_SIMPLE)
        self._held = True
        job = &self._job
        job.fd = fd
        job.arena = <const char*>self._arena.buf
        job.count = len(segments)
        job.pieces = pieces_of(segments, self._arena.len)
        if placer is None or not placer.runs():
            placer = Placer()
        if placer.runs():
            self._placer = placer
            placer.begin(job)
        else:
            with nogil:
                carry_out(job)

    def __dealloc__(self):
        self._wait()
        self._release()
        free(self._job.pieces)

    cdef void _wait(self) noexcept:
        if self._placer is not None:
            if self._placer.runs():
                self._placer.wait(&self._job)
            self._placer = None

    cdef void _release(self) noexcept:
        if self._held:
            self._held = False
            PyBuffer_Release(&self._arena)

    @property
    def ended(self):
        """Whether `finish` will not have to wait."""
        return (self._placer is None or not self._placer.runs()
                or self._placer.has_done(&self._job))

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
        """Wait until the thread has written this, and what was placed before it; ignore errors."""
        self._wait()
        self._job.failed = 0
        self._release()
