"""The most frequent queries, parsed together: of the header, of entries and of bookmarks.

Must not know whether a connection may ask them; `server.py` does.
"""

from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from libc.stdint cimport uint8_t, uint64_t

from datastreamer._entry cimport MAX_BOOKMARK_SIZE, get_u32, get_u64

from datastreamer.format import COMMAND_BOOKMARK, COMMAND_ENTRY, COMMAND_HEADER
from datastreamer.protocol.commands import HeaderQuery

cdef enum:
    HEAD = 16           # a command and the stream type
    NUMBERED = HEAD + 8
    KEYED = HEAD + 4

cdef object HEADER_QUERY = HeaderQuery()
cdef uint64_t ASKS_HEADER = COMMAND_HEADER
cdef uint64_t ASKS_ENTRY = COMMAND_ENTRY
cdef uint64_t ASKS_BOOKMARK = COMMAND_BOOKMARK


def queries_in(bytes buffer not None, Py_ssize_t at, uint64_t stream_type, Py_ssize_t most):
    """The queries of this stream type in `buffer` from `at` on, up to `most`, and where they end.

    A query of an entry is its number, one of a bookmark its key. Stops before anything else, and
    before a query that is not whole or is wrong.
    """
    cdef const uint8_t* p = <const uint8_t*>PyBytes_AS_STRING(buffer)
    cdef Py_ssize_t end = PyBytes_GET_SIZE(buffer), left = most, size
    cdef uint64_t command
    cdef list found = []
    if at < 0:
        raise ValueError(f"no bytes begin at {at}")
    while left > 0 and end - at >= HEAD and get_u64(p + at + 8) == stream_type:
        command = get_u64(p + at)
        if command == ASKS_HEADER:
            found.append(HEADER_QUERY)
            at += HEAD
        elif command == ASKS_ENTRY and end - at >= NUMBERED:
            found.append(get_u64(p + at + HEAD))
            at += NUMBERED
        elif command == ASKS_BOOKMARK and end - at >= KEYED:
            size = get_u32(p + at + HEAD)
            if not 1 <= size <= MAX_BOOKMARK_SIZE or end - at < KEYED + size:
                break
            found.append(PyBytes_FromStringAndSize(<const char*>p + at + KEYED, size))
            at += KEYED + size
        else:
            break
        left -= 1
    return found, at
