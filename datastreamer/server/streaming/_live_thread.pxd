"""What the live thread shares with the event loop, and how it reads what was committed."""

from libc.errno cimport EINTR, errno
from libc.stdint cimport int64_t, uint8_t, uint32_t, uint64_t
from libc.stdlib cimport realloc
from libc.string cimport memcmp
from posix.unistd cimport pread, write

from datastreamer._entry cimport (
    HEAD_SIZE, HEADER_PAGE_SIZE, NOTHING, PADDING, PAGE_SIZE, PART, WHOLE, Verdict, get_u64, judge,
    page_room,
)
from datastreamer.server.streaming._waking cimport EarlyWaker
from datastreamer.storage.disk._threads cimport (
    pthread_cond_t, pthread_cond_wait, pthread_mutex_lock, pthread_mutex_t, pthread_mutex_unlock,
)
from datastreamer.storage.pages._xxh3 cimport xxh3_of_33_to_96

cdef extern from *:
    """
    static void set_flag(int *flag, int value) { __atomic_store_n(flag, value, __ATOMIC_SEQ_CST); }
    static int get_flag(int *flag) { return __atomic_load_n(flag, __ATOMIC_SEQ_CST); }
    """
    void set_flag(int*, int) nogil
    int get_flag(int*) nogil

cdef enum:
    # A pass sends at most this much to each client, or one entry.
    PASS_BYTES = 128 * 1024
    # Header pages in a row, at intervals of POLL_MS at most, that were not those of whole commits.
    MOST_TORN = 3

# `records.VISIBLE_LAYOUT`.
cdef int TOTALS, TOTALS_END, ENDS, AFTER, MARK, MARKED, MARK_END


cdef struct Place:
    int64_t offset
    uint64_t number


cdef struct Client:
    int fd              # -1: the slot is free
    bint dropped        # it received less than a whole span, or its connection is lost
    int error
    Place cursor
    int64_t at          # the next byte: after the cursor if an entry was sent in part


cdef struct Shared:
    pthread_mutex_t guard
    pthread_cond_t resume
    int waiting         # the event loop waits for the guard; atomic
    bint armed
    bint closing
    bint stopped        # the thread has disarmed itself
    bint wants          # each pass is to be reported
    uint64_t turn       # changes whenever the thread is armed or disarmed
    int file
    int wakeup
    int watch           # reports writes to `wakeup`; -1: `wakeup` is read
    int reports         # readable after writes to the file by any program; -1: none
    bint polls          # nothing reports writes
    EarlyWaker early    # written when a commit begins after a pause
    int notice
    Place top           # how far clients were sent
    Client* clients
    Py_ssize_t count    # of the slots up to the last client
    Py_ssize_t used     # of the clients
    Py_ssize_t capacity
    Py_ssize_t dropped
    uint64_t bytes_sent
    uint64_t entries_sent
    uint8_t[HEADER_PAGE_SIZE] settled
    # Of the thread alone.
    uint8_t[HEADER_PAGE_SIZE] page
    uint8_t* data
    int64_t room
    int torn
    bint soon           # it has asked to run soon when it is woken
    uint64_t usual      # its slice without that, in ns


cdef enum Outcome:
    IDLE        # nothing is new
    MORE        # something may be new
    STOP        # another part has to decide


cdef inline void notify(Shared* it) noexcept nogil:
    cdef uint64_t one = 1
    while write(it.notice, &one, 8) < 0 and errno == EINTR:
        pass


cdef inline bint give_way(Shared* it, uint64_t turn) noexcept nogil:
    """Let the event loop have the guard if it waits for it; whether the thread is still armed."""
    while get_flag(&it.waiting):
        pthread_cond_wait(&it.resume, &it.guard)
    return it.armed and it.turn == turn


cdef inline bint read_unlocked(Shared* it, uint64_t turn, void* to, int64_t size, int64_t offset,
                               int64_t* got) noexcept nogil:
    """`pread`, without the guard meanwhile; whether the thread is still armed."""
    pthread_mutex_unlock(&it.guard)
    got[0] = pread(it.file, to, size, offset)
    while got[0] < 0 and errno == EINTR:
        got[0] = pread(it.file, to, size, offset)
    pthread_mutex_lock(&it.guard)
    return give_way(it, turn)


cdef inline bint only_commits(Shared* it) noexcept nogil:
    """Whether the header page differs from the settled one in what commits change only."""
    return (memcmp(it.page, it.settled, TOTALS) == 0
            and memcmp(it.page + TOTALS_END, it.settled + TOTALS_END, ENDS - TOTALS_END) == 0
            and memcmp(it.page + MARK, it.settled + MARK, MARKED - MARK) == 0)


cdef inline Outcome look(Shared* it, uint64_t turn, Place* head) noexcept nogil:
    """Find the visible head: MORE if there is one. As `records.committed_since`, but without the
    commit record's sum: the mark is written last, and has its own."""
    cdef int64_t got
    if not read_unlocked(it, turn, it.page, MARK_END + 8, 0, &got):
        return IDLE
    if got < MARK_END + 8 or not only_commits(it):
        return STOP
    head.offset = <int64_t>get_u64(it.page + MARKED)
    head.number = get_u64(it.page + MARKED + 8)
    if (xxh3_of_33_to_96(it.page + MARK, MARK_END - MARK) != get_u64(it.page + MARK_END)
            or memcmp(it.page + TOTALS, it.page + AFTER, TOTALS_END - TOTALS) != 0
            or head.offset > <int64_t>get_u64(it.page + AFTER)):
        # In the middle of a commit, which wakes the thread at its end. If it stays so, a program
        # that writes no commit record appends.
        it.torn += 1
        return STOP if it.torn > MOST_TORN else IDLE
    it.torn = 0
    return MORE


cdef inline bint have_room(Shared* it, int64_t size) noexcept nogil:
    cdef uint8_t* more
    if it.room < size:
        more = <uint8_t*>realloc(it.data, size)
        if more == NULL:
            return False
        it.data = more
        it.room = size
    return True


cdef inline Outcome take(Shared* it, uint64_t turn, Place* begin, const Place* head, uint64_t limit,
                         Place* end) noexcept nogil:
    """Read whole entries of one page from `begin` on, up to entry `limit`, at most a pass of them;
    MORE if `begin` (moved after padding) to `end` are in `data`. They were committed when they were
    read."""
    cdef int64_t size = PASS_BYTES, got, room, at
    cdef uint8_t[HEAD_SIZE] following
    cdef uint32_t length
    cdef Verdict verdict
    while True:
        room = page_room(begin.offset)
        size = min(size, min(room, head.offset - begin.offset))
        if not have_room(it, size):
            return STOP
        if not read_unlocked(it, turn, it.data, size, begin.offset, &got):
            return IDLE
        if got < size:
            return STOP
        at = 0
        end[0] = begin[0]
        verdict = NOTHING
        while end.number < limit:
            verdict = judge(it.data + at, size - at, room - at, end.number, &length)
            if verdict != WHOLE:
                break
            at += length
            end.number += 1
        end.offset = begin.offset + at
        if end.number == limit:
            break
        if verdict == PADDING and room < PAGE_SIZE and room + HEAD_SIZE <= head.offset - begin.offset:
            # Believed if the next page begins with the next entry.
            if not read_unlocked(it, turn, following, HEAD_SIZE, begin.offset + room, &got):
                return IDLE
            if got < HEAD_SIZE:
                return STOP
            verdict = judge(following, HEAD_SIZE, PAGE_SIZE, end.number, &length)
            if verdict != PART and verdict != WHOLE:
                return STOP
            if at == 0:
                begin.offset += room
                size = PASS_BYTES
                continue
        elif verdict == PART and begin.offset + size < head.offset and size < room:
            if at == 0:
                # One large entry.
                size = length
                continue
        elif verdict != NOTHING:
            return STOP
        break
    if at == 0 or (end.offset == head.offset) != (end.number == head.number):
        return STOP
    # Bytes change only after the page says so: then what was read may not be what was committed.
    if not read_unlocked(it, turn, it.page, MARK_END + 8, 0, &got):
        return IDLE
    return MORE if got == MARK_END + 8 and only_commits(it) else STOP
