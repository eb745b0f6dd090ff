"""Finds the selected entries of a page by one walk over all heads, and joins their bytes.

Knows bytes; must not know files, sockets or clocks.
"""

cimport cython
from cpython.buffer cimport PyBUF_SIMPLE, PyBuffer_Release, PyObject_GetBuffer
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize
from libc.stdint cimport int64_t, uint8_t, uint32_t, uint64_t
from libc.stdlib cimport free, realloc
from libc.string cimport memcpy

from datastreamer._codec cimport as_file_offset, as_u64
from datastreamer._entry cimport (
    EMPTY_PAGE, HEAD_SIZE, PADDING, PAGE_SIZE, PART, Verdict, WHOLE, get_u32, judge, page_room,
)

from datastreamer.selection._selection cimport Selection, free_selection, is_wanted, select_clauses

from datastreamer._pages import walk
from datastreamer.errors import UsageError
from datastreamer.format import MAX_CLAUSES
from datastreamer.selection.clauses import selected

cdef enum:
    # Runs of at least this size are returned as offsets: sendfile is cheaper than a copy.
    LONG_RUN = 64 << 10

cdef struct Piece:
    Py_ssize_t start
    Py_ssize_t end


cdef struct Walk:
    const uint8_t* base
    Py_ssize_t have      # bytes in the buffer
    Py_ssize_t until     # committed bytes in this page
    Py_ssize_t at
    Py_ssize_t room
    uint64_t due
    uint64_t stop
    uint64_t most
    Py_ssize_t most_bytes
    bint alone           # no entry was found before this walk
    # Output:
    uint64_t count
    Py_ssize_t size
    Py_ssize_t run       # start of the run of wanted entries that ends at `at`; -1: no run
    uint64_t run_due
    uint64_t run_count
    Py_ssize_t run_size
    Piece* pieces
    Py_ssize_t piece_count
    Py_ssize_t capacity
    bint long_run        # the result is one long run, returned as offsets
    bint full            # a limit or a long run ended the walk
    bint no_memory


@cython.final
cdef class Choice:
    """The entries that are wanted, by 1 to 64 clauses in any order: types, and `Where`.

    Raises `BadEntryType` and `UsageError` for an invalid clause, for none and for too many.
    """

    cdef Selection _selection
    cdef readonly tuple where

    def __cinit__(self, where):
        self.where = selected(where=where)
        if len(self.where) > MAX_CLAUSES:
            raise UsageError(f"1 to {MAX_CLAUSES} clauses, not {len(self.where)}")
        select_clauses(&self._selection, self.where)

    def __dealloc__(self):
        free_selection(&self._selection)

    def gather(self, buffer, number, *, file_offset, committed, stop, most_entries, most_bytes,
               alone):
        """Find the wanted entries of one page, from entry `number` on. `buffer` begins with that
        entry, at `file_offset` of the file. `committed` bytes of the page follow that offset;
        `buffer` may hold fewer.

        Ends before entry `stop`, at padding, at the end of `buffer` (past it, if an unwanted
        entry extends past it), and before a wanted entry that would exceed `most_entries` or
        `most_bytes`. The first match is included even if it exceeds `most_bytes`; `alone`:
        there was no match before this call. Returns

        - where the walk ended, as an offset from the start of `buffer`,
        - the number of the entry that is due there,
        - the number of matches,
        - their bytes; None if they are a long run, which the caller reads from the file,
        - the offset at which the long run begins, which ends where the walk did; else -1,
        - whether a limit or a long run ended the walk,
        - whether padding ended it.

        A long run, of 64 KiB or more, is returned alone, by a walk that begins with it. Raises
        as `walk`, if the first entry is damaged.
        """
        cdef Py_buffer view
        cdef Walk walked
        cdef Verdict verdict
        cdef bytes data = None
        cdef char* to
        cdef Py_ssize_t i
        cdef uint64_t begin = as_u64(number, "an entry number")
        cdef int64_t offset = as_file_offset(file_offset)
        walked.due = begin
        walked.stop = as_u64(stop, "an entry number")
        walked.most = as_u64(most_entries, "most_entries")
        walked.most_bytes = most_bytes
        walked.until = committed
        walked.alone = alone
        walked.room = page_room(offset)
        walked.at = 0
        walked.count = walked.run_count = walked.run_due = 0
        walked.size = walked.run_size = 0
        walked.run = -1
        walked.pieces = NULL
        walked.piece_count = walked.capacity = 0
        walked.long_run = walked.full = walked.no_memory = False
        PyObject_GetBuffer(buffer, &view, PyBUF_SIMPLE)
        try:
            walked.base = <const uint8_t*>view.buf
            walked.have = view.len
            if walked.until > walked.room or walked.have > walked.until:
                raise ValueError("the buffer exceeds the committed bytes, or these the page")
            verdict = self._walk(&walked)
            if walked.no_memory:
                raise MemoryError
            if verdict not in (WHOLE, PART, PADDING) and walked.at < walked.have:
                if walked.due == begin:
                    walk(buffer, number, file_offset=file_offset)  # raises the error
                    raise AssertionError("the two walks disagree about the first entry")
            if not walked.long_run:
                data = PyBytes_FromStringAndSize(NULL, walked.size)
                to = PyBytes_AS_STRING(data)
                for i in range(walked.piece_count):
                    memcpy(to, walked.base + walked.pieces[i].start,
                           walked.pieces[i].end - walked.pieces[i].start)
                    to += walked.pieces[i].end - walked.pieces[i].start
        finally:
            free(walked.pieces)
            PyBuffer_Release(&view)
        return (walked.at, walked.due, walked.count, data,
                walked.run if walked.long_run else -1, walked.full, verdict == PADDING)

    cdef Verdict _walk(self, Walk* w) noexcept nogil:
        cdef Verdict verdict = WHOLE
        cdef uint32_t length = 0
        cdef int wanted
        cdef const uint8_t* p
        while w.due < w.stop and w.room and w.at < w.have:
            p = w.base + w.at
            verdict = judge(p, w.have - w.at, w.room, w.due, &length)
            if verdict == PART and w.have - w.at < HEAD_SIZE:
                break
            if verdict == PADDING and w.room == PAGE_SIZE:
                verdict = EMPTY_PAGE
            if verdict != WHOLE and verdict != PART:
                break
            if <Py_ssize_t>length > w.until - w.at:
                verdict = PART  # it extends past the committed part of the page
                break
            wanted = is_wanted(&self._selection, get_u32(p + 5), p + HEAD_SIZE,
                               w.have - w.at - HEAD_SIZE, length - HEAD_SIZE)
            if wanted < 0:
                verdict = PART  # the buffer ends before the bytes that decide
                break
            if not wanted:
                if w.run >= 0 and (not close_run(w) or w.long_run):
                    break
            else:
                if w.count >= w.most or (
                        length > w.most_bytes - w.size and not (w.alone and not w.count)):
                    w.full = True
                    break
                if w.run < 0:
                    w.run = w.at
                    w.run_due, w.run_count, w.run_size = w.due, w.count, w.size
                if w.at + <Py_ssize_t>length - w.run >= LONG_RUN and not (
                        w.alone and not w.run_count):
                    # The next walk returns it alone.
                    w.at, w.due, w.count, w.size = w.run, w.run_due, w.run_count, w.run_size
                    w.run = -1
                    w.full = True
                    return WHOLE
                if verdict == PART and w.at + <Py_ssize_t>length - w.run < LONG_RUN:
                    break
                w.count += 1
                w.size += length
            w.at += length
            w.room -= length
            w.due += 1
            verdict = WHOLE
        if w.run >= 0 and not w.long_run and not w.no_memory:
            close_run(w)
        return verdict


cdef bint close_run(Walk* w) noexcept nogil:
    """End the run of wanted entries at `at`; False if there is no memory."""
    cdef void* moved
    if w.at - w.run >= LONG_RUN:
        w.long_run = w.full = True
        return True
    if w.at > w.run:
        if w.piece_count == w.capacity:
            w.capacity = 2 * w.capacity + 64
            moved = realloc(w.pieces, w.capacity * sizeof(Piece))
            if moved == NULL:
                w.no_memory = True
                return False
            w.pieces = <Piece*>moved
        w.pieces[w.piece_count].start = w.run
        w.pieces[w.piece_count].end = w.at
        w.piece_count += 1
    w.run = -1
    return True
