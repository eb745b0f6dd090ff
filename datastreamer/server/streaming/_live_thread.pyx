"""A thread that sends new entries to live clients as they are committed, without the GIL.

Owns the descriptors and positions of these clients while the thread is *armed*, and the walk over
new entries (`_live_thread.pxd`). It reads and sends only what the header page shows as committed,
and stops at the first change of the page that is no commit: another part decides then. Knows
descriptors and bytes, not clients. `live_clients.py` is its only user.
"""

from libc.errno cimport EAGAIN
from libc.stdlib cimport calloc, free
from libc.string cimport memcpy
from posix.unistd cimport close, read

from datastreamer.server.streaming._waking cimport (
    ask_to_run_soon, open_watch, wait_for_write, watch_early,
)
from datastreamer.storage.disk._threads cimport (
    create_without_signals, pthread_cond_destroy, pthread_cond_init, pthread_cond_signal,
    pthread_join, pthread_mutex_destroy, pthread_mutex_init, pthread_t,
)

import os
import weakref

from datastreamer.storage.header.records import VISIBLE_LAYOUT

cdef extern from *:
    """
    #include <sys/socket.h>
    #ifndef MSG_NOSIGNAL
    #define MSG_NOSIGNAL 0
    #endif
    """
    ssize_t send(int fd, const void* data, size_t size, int flags) nogil
    int MSG_DONTWAIT
    int MSG_NOSIGNAL

cdef enum:
    # Interval of looks at the file if nothing reports writes to it, and in the middle of a commit.
    POLL_MS = 10
    # With this many clients the thread may go before the writer that woke it: those that run on
    # their CPU get a commit in half the time. With one there is nothing to gain; with more, the
    # writer would wait for more than half a millisecond.
    SOON_FROM = 2
    SOON_TO = 128
    # With up to this many, a commit wakes the thread at its beginning, too. It then often shares a
    # CPU with the writer and with clients of this machine: measured with 10, 20 and 40 of them, a
    # commit reaches the median client in 0.6, 0.75 and 0.95 of the time; with 100, in more.
    EARLY_TO = 32

TOTALS, TOTALS_END, ENDS, AFTER, MARK, MARKED, MARK_END = VISIBLE_LAYOUT
if not 33 <= MARK_END - MARK <= 64 or MARK_END + 8 > HEADER_PAGE_SIZE:
    raise ImportError("the visible mark has another size than its sum is computed for")


cdef void send_to(Shared* it, Client* client, Place* begin, Place* end) noexcept nogil:
    cdef int64_t size = end.offset - begin.offset
    cdef ssize_t sent = send(client.fd, it.data, size, MSG_DONTWAIT | MSG_NOSIGNAL)
    while sent < 0 and errno == EINTR:
        sent = send(client.fd, it.data, size, MSG_DONTWAIT | MSG_NOSIGNAL)
    if sent > 0:
        it.bytes_sent += sent
    if sent == size:
        it.entries_sent += end.number - begin.number
        client.cursor = end[0]
        client.at = end.offset
        return
    client.error = 0 if sent >= 0 or errno == EAGAIN else errno
    if sent > 0:
        client.at = begin.offset + sent
    client.dropped = True
    it.dropped += 1


cdef void rise(Shared* it, const Place* top) noexcept nogil:
    if top.number > it.top.number:
        it.top = top[0]
        if it.wants:
            notify(it)


cdef Outcome step(Shared* it) noexcept nogil:
    """Send the clients that have least what comes next, up to where others are."""
    cdef uint64_t turn = it.turn
    cdef uint64_t limit
    cdef Place head, begin, end
    cdef Client* client
    cdef Py_ssize_t i
    cdef Outcome outcome = look(it, turn, &head)
    if outcome != MORE:
        return outcome
    if head.number < it.top.number or head.offset < it.top.offset or (
            head.number > it.top.number and head.offset == it.top.offset):
        return STOP
    begin = head
    limit = head.number
    for i in range(it.count):
        client = it.clients + i
        if client.fd < 0 or client.dropped:
            continue
        if client.cursor.number < begin.number:
            limit = begin.number
            begin = client.cursor
        elif begin.number < client.cursor.number < limit:
            limit = client.cursor.number
    if begin.number == head.number:
        rise(it, &head)
        return IDLE
    outcome = take(it, turn, &begin, &head, limit, &end)
    if outcome != MORE:
        return outcome
    i = 0
    while i < it.count:
        client = it.clients + i
        if client.fd >= 0 and not client.dropped and client.cursor.number == begin.number:
            send_to(it, client, &begin, &end)
            if not give_way(it, turn):
                return IDLE
        i += 1
    if it.dropped:
        notify(it)
    rise(it, &end)
    # A commit since the look wakes the thread.
    return IDLE if end.number == head.number else MORE


cdef void* run(void* what) noexcept nogil:
    cdef Shared* it = <Shared*>what
    cdef uint64_t turn
    cdef Outcome outcome
    cdef bint readable, soon, early
    cdef int milliseconds
    cdef uint8_t[4096] ignored
    pthread_mutex_lock(&it.guard)
    while True:
        while not it.closing and (not it.armed or get_flag(&it.waiting)):
            pthread_cond_wait(&it.resume, &it.guard)
        if it.closing:
            break
        turn = it.turn
        outcome = step(it)
        if it.turn != turn or outcome == MORE:
            continue
        if outcome == STOP:
            it.armed = False
            it.stopped = True
            it.turn += 1
            notify(it)
            continue
        soon = SOON_FROM <= it.used <= SOON_TO
        early = 0 < it.used <= EARLY_TO
        milliseconds = POLL_MS if it.polls or it.torn else -1
        pthread_mutex_unlock(&it.guard)
        if soon != it.soon:
            ask_to_run_soon(soon, &it.usual)
            it.soon = soon
        watch_early(it.watch, &it.early, early)
        readable = wait_for_write(it.wakeup, it.watch, it.reports, &it.early, milliseconds)
        pthread_mutex_lock(&it.guard)
        # If it is not armed any more, the event loop waits for it.
        if readable and give_way(it, turn):
            read(it.wakeup, ignored, 4096)
    pthread_mutex_unlock(&it.guard)
    return NULL


_threads = weakref.WeakSet()


def _lose_all():
    for thread in list(_threads):
        (<LiveThread>thread)._lose()


os.register_at_fork(after_in_child=_lose_all)


cdef class LiveThread:
    """The thread, and the live clients while it is armed. For the event loop's thread only.

    Each call waits for the end of at most one `send` of the thread.
    """

    cdef Shared* _it
    cdef pthread_t _thread
    cdef bint _runs
    cdef object __weakref__

    def __cinit__(self, int file, int wakeup, int notice, int early=-1, int reports=-1, *,
                  bint polls=False):
        """`wakeup` becomes readable with each commit to `file`, and `early`, an eventfd (-1: none),
        when one begins after a pause; or `reports` (-1: none) with each write to it; with `polls`
        the thread looks every 10 ms. It makes `notice`, an eventfd, readable when `collect` has
        something to return. Raises `OSError` if the system has no thread or descriptor left."""
        cdef int failed
        self._it = <Shared*>calloc(1, sizeof(Shared))
        if self._it == NULL:
            raise MemoryError
        self._it.file = self._it.watch = -1
        pthread_mutex_init(&self._it.guard, NULL)
        pthread_cond_init(&self._it.resume, NULL)
        # The stream may be closed, and its descriptor reused, while the thread reads.
        self._it.file = os.dup(file)
        self._it.wakeup = wakeup
        self._it.watch = open_watch(wakeup, reports)
        self._it.reports = reports
        # Of a pipe it has the end that cannot wake it.
        self._it.polls = polls or self._it.watch < 0
        self._it.notice = notice
        self._it.early.fd = early
        if reports >= 0 and self._it.watch < 0:
            self._free()
            raise OSError(errno, os.strerror(errno))
        failed = create_without_signals(&self._thread, run, self._it)
        if failed:
            self._free()
            raise OSError(failed, os.strerror(failed))
        self._runs = True
        _threads.add(self)

    def __dealloc__(self):
        if self._it != NULL:
            self._end()

    cdef void _lock(self) noexcept:
        with nogil:
            set_flag(&self._it.waiting, 1)
            pthread_mutex_lock(&self._it.guard)
            set_flag(&self._it.waiting, 0)

    cdef void _unlock(self) noexcept:
        pthread_cond_signal(&self._it.resume)
        pthread_mutex_unlock(&self._it.guard)

    cdef void _free(self) noexcept:
        if self._it.file >= 0:
            close(self._it.file)
        if self._it.watch >= 0:
            close(self._it.watch)
        pthread_cond_destroy(&self._it.resume)
        pthread_mutex_destroy(&self._it.guard)
        free(self._it.clients)
        free(self._it.data)
        free(self._it)
        self._it = NULL

    cdef void _lose(self) noexcept:
        """In the child of a fork: there is no thread, which may have held the guard."""
        if self._it != NULL:
            pthread_mutex_init(&self._it.guard, NULL)
            pthread_cond_init(&self._it.resume, NULL)
            self._it.armed = False
            self._runs = False

    cdef void _end(self) noexcept:
        if self._runs:
            self._lock()
            self._it.closing = True
            self._it.armed = False
            self._unlock()
            self._wake()
            with nogil:
                pthread_join(self._thread, NULL)
        self._free()

    cdef void _wake(self) noexcept:
        """It may be waiting for a commit."""
        cdef uint64_t one = 1
        write(self._it.wakeup, &one, 8)

    def wake(self):
        """Have the thread look at the file."""
        self._wake()

    def close(self):
        """End the thread; no other call follows. Idempotent."""
        if self._it != NULL:
            self._end()

    def arm(self, page, int64_t offset, uint64_t number):
        """From now on the thread sends what follows entry `number`, at file offset `offset`, to all
        clients. `page` is the header page without a change in progress, up to the mark's end."""
        cdef const uint8_t[::1] settled = page
        cdef Py_ssize_t i
        if settled.shape[0] < MARK_END + 8:
            raise ValueError("the page ends before the mark")
        self._lock()
        memcpy(self._it.settled, &settled[0], MARK_END + 8)
        self._it.top.offset = offset
        self._it.top.number = number
        for i in range(self._it.count):
            self._it.clients[i].cursor = self._it.top
            self._it.clients[i].at = offset
        self._it.torn = 0
        self._it.stopped = False
        self._it.armed = True
        self._it.turn += 1
        self._unlock()

    def disarm(self):
        """The thread sends nothing any more, and does not read `wakeup`. Returns the positions of
        the clients that were not dropped: slot, offset, number."""
        self._lock()
        self._it.armed = False
        self._it.turn += 1
        try:
            return self._positions()
        finally:
            self._unlock()

    def positions(self):
        """As `disarm` returns it."""
        self._lock()
        try:
            return self._positions()
        finally:
            self._unlock()

    cdef list _positions(self):
        cdef Client* client
        cdef Py_ssize_t i
        found = []
        for i in range(self._it.count):
            client = self._it.clients + i
            if client.fd >= 0 and not client.dropped:
                found.append((i, client.cursor.offset, client.cursor.number))
        return found

    def want(self, bint wants, uint64_t number):
        """Whether `notice` becomes readable after each pass. With `wants` it does at once if
        clients were sent entries after entry `number` already."""
        self._lock()
        self._it.wants = wants
        if wants and self._it.top.number > number:
            notify(self._it)
        self._unlock()

    def add(self, int fd, int64_t offset, uint64_t number):
        """Add a client; returns its slot."""
        cdef Client* more
        cdef Py_ssize_t i, room
        self._lock()
        try:
            i = 0
            while i < self._it.count and self._it.clients[i].fd >= 0:
                i += 1
            if i == self._it.capacity:
                room = 2 * i + 8
                more = <Client*>realloc(self._it.clients, room * sizeof(Client))
                if more == NULL:
                    raise MemoryError
                self._it.clients = more
                self._it.capacity = room
            if i == self._it.count:
                self._it.count += 1
            self._it.clients[i].fd = fd
            self._it.used += 1
            self._it.clients[i].dropped = False
            self._it.clients[i].error = 0
            self._it.clients[i].cursor.offset = self._it.clients[i].at = offset
            self._it.clients[i].cursor.number = number
            # A pass in progress may have gone past its slot.
            if self._it.armed:
                self._wake()
            return i
        finally:
            self._unlock()

    def remove(self, Py_ssize_t slot):
        """Remove a client, whose descriptor is not used any more then; returns its position: offset
        and number of the next entry, offset of the next byte."""
        self._lock()
        try:
            return self._remove(slot)[:3]
        finally:
            self._unlock()

    cdef tuple _remove(self, Py_ssize_t slot):
        cdef Client* client = self._it.clients + slot
        self._it.dropped -= client.dropped
        self._it.used -= 1
        client.fd = -1
        client.dropped = False
        while self._it.count and self._it.clients[self._it.count - 1].fd < 0:
            self._it.count -= 1
        return client.cursor.offset, client.cursor.number, client.at, client.error

    def collect(self):
        """Remove the clients that were dropped.

        Returns whether the thread has disarmed itself; how far clients were sent (offset and
        number); the bytes and entries sent since the last call; and of each client that was
        dropped the slot, offset and number of the next entry, offset of the next byte, and the
        errno of a lost connection, or 0.
        """
        cdef Py_ssize_t i
        self._lock()
        try:
            dropped = []
            if self._it.dropped:
                for i in range(self._it.count - 1, -1, -1):
                    if self._it.clients[i].fd >= 0 and self._it.clients[i].dropped:
                        dropped.append((i, *self._remove(i)))
            counted = self._it.bytes_sent, self._it.entries_sent
            self._it.bytes_sent = self._it.entries_sent = 0
            top = self._it.top.offset, self._it.top.number
            return bool(self._it.stopped), top, counted, dropped
        finally:
            self._unlock()
