"""Answers to the most frequent queries, as far as they are at hand, in one call.

Owns nothing: `queries.py` decides when they are sent, and whether they are read again before.
"""

from cpython.bytes cimport PyBytes_GET_SIZE
from libc.stdint cimport uint64_t

from datastreamer.storage.bookmarks._at_hand cimport LookUpsAtHand
from datastreamer.storage.read._at_hand cimport ReadsAtHand

from datastreamer.format import PACKET_ANSWER
from datastreamer.protocol.messages import NOT_FOUND, OK
from datastreamer.storage.bookmarks._at_hand import NotAtHandError

cdef bytes ITS_OK = OK
cdef bytes NO_BOOKMARK = OK + NOT_FOUND
cdef unsigned char PACKET = PACKET_ANSWER


def answers_at_hand(list queries not None, ReadsAtHand reads not None, state, pages not None,
                    bookmarks, header, list answers not None, Py_ssize_t most_bytes):
    """Append the answers to `queries` to `answers`, until they have `most_bytes` or one is not at
    hand. Returns the numbers of entries and of bookmarks among them, and their bytes.

    `queries` are as `ServerConnection.queries` returns them. `state` is the reader's. `pages` are
    those of `ReadsAtHand.packed`. `bookmarks` (a `BookmarkQueries`) looks keys up at `state`.
    `header()` returns the answer to a query of the header.
    """
    cdef list tables = state.pages.directory[1]
    cdef uint64_t total = state.head.entries
    cdef Py_ssize_t size = 0
    cdef Py_ssize_t entries = 0, keys = 0
    cdef bytes answer, header_answer = None
    cdef LookUpsAtHand look_ups = None
    try:
        for asked in queries:
            if type(asked) is int:
                answer = reads.packed(tables, total, pages, asked, ITS_OK, PACKET, None)
                entries += answer is not None
            elif type(asked) is bytes:
                if look_ups is None:
                    look_ups = bookmarks.shared
                    if look_ups is None or not look_ups.hold_at(state):
                        look_ups = bookmarks.at_hand(state)
                number = look_ups.newest(<bytes>asked)
                if number is None:
                    answer = NO_BOOKMARK
                else:
                    answer = reads.packed(tables, total, pages, number, ITS_OK, PACKET,
                                          <bytes>asked)
                keys += answer is not None
            else:
                if header_answer is None:
                    header_answer = header()
                answer = header_answer
            if answer is None:
                break
            answers.append(answer)
            size += PyBytes_GET_SIZE(answer)
            if size >= most_bytes:
                break
    except NotAtHandError:
        pass
    return entries, keys, size
