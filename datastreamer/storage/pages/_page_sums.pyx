"""The hashes of a stream's entries up to an end that advances, page by page; and chains over many
hashes at once.

`hashes.py` says what is hashed. Knows bytes and file offsets, and neither files nor where hashes
are stored, only the layout of their records (`sidecar.py`).
"""

cimport cython
from cpython.buffer cimport PyBUF_SIMPLE, PyBuffer_Release, PyObject_GetBuffer
from cpython.bytearray cimport PyByteArray_AS_STRING
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize
from libc.stdint cimport int64_t, uint8_t, uint64_t
from libc.string cimport memcmp, memcpy

from datastreamer._entry cimport HEAD_SIZE, HEADER_PAGE_SIZE, PAGE_SIZE, get_u64, put_u64
from datastreamer.storage.pages._xxh3 cimport xxh3_128_of_32, xxh3_of_33_to_96

from xxhash import xxh3_128

from datastreamer.storage.pages.hashes import NO_CHAIN, EndSum, PageHash, chained


@cython.final
cdef class PageSums:
    """The hashes up to an end.

    `finished` are the pages that became whole since the list was last cleared, in order.
    """

    def __init__(self, page=0, *, chain=b"\0" * 16, chained_from=None, end=None, tail=None):
        """From the start of data page `page` on. The chain over the pages before it, from
        `chained_from` on (None: this page is the first that it covers), is `chain`. `tail` is the
        running hash of the page's entries, which end at file offset `end`; None: of none."""
        self._page = page
        self._page_end = HEADER_PAGE_SIZE + (self._page + 1) * PAGE_SIZE
        self._end = self._page_end - PAGE_SIZE if end is None else end
        self._chain = chain
        self._chained_from = page if chained_from is None else chained_from
        self._tail = xxh3_128() if tail is None else tail
        self._finished = []

    @property
    def page(self):
        """The last page."""
        return self._page

    @property
    def end(self):
        """The file offset at which its entries end."""
        return self._end

    @property
    def chain(self):
        """The chain over the pages before it."""
        return self._chain

    @property
    def chained_from(self):
        """The first page that the chain covers; 0 if it covers all."""
        return self._chained_from

    @property
    def finished(self):
        """The pages that became whole (`PageHash`)."""
        return self._finished

    def copy(self):
        """The same; a change of one does not change the other."""
        cdef PageSums other = PageSums.__new__(PageSums)
        other._page = self._page
        other._page_end = self._page_end
        other._end = self._end
        other._chain = self._chain
        other._chained_from = self._chained_from
        other._tail = self._tail.copy()
        other._finished = self._finished.copy()
        return other

    def rechain(self, chain, chained_from):
        """Replace the chain: `chain`, over the pages from `chained_from` on, ends before the pages
        in `finished`."""
        for page in self._finished:
            if page.digest == NO_CHAIN:
                chain, chained_from = NO_CHAIN, page.page + 1
            else:
                chain = chained(chain, page.digest)
        self._chain = chain
        self._chained_from = chained_from

    def add(self, entries, int64_t offset):
        """Add whole entries of one page, at least one, which begin at `offset` of the file.

        Raises `ValueError` if they are not in the last page or the one after it.
        """
        cdef Py_buffer view
        PyObject_GetBuffer(entries, &view, PyBUF_SIMPLE)
        try:
            if view.len < HEAD_SIZE:
                raise ValueError("an entry has at least 17 bytes")
            if offset >= self._page_end:
                if offset >= self._page_end + PAGE_SIZE:
                    raise ValueError(f"offset {offset} is not in page {self._page} or the next")
                self._finish(get_u64(<const uint8_t*>view.buf + 9))
            self._tail.update(entries)
            self._end = offset + view.len
        finally:
            PyBuffer_Release(&view)

    cdef _finish(self, next_number):
        """The last page is whole; entry `next_number` begins the next one."""
        digest = self._tail.digest()
        end = self._end - (self._page_end - PAGE_SIZE)
        self._finished.append(PageHash(self._page, end, next_number, digest))
        if digest == NO_CHAIN:  # of a damaged page whose hash is not known
            self._chain, self._chained_from = NO_CHAIN, self._page + 1
        else:
            self._chain = chained(self._chain, digest)
        self._page += 1
        self._page_end += PAGE_SIZE
        self._tail = xxh3_128()

    def sum(self):
        """The `EndSum` of the entries that were added so far."""
        return EndSum(self._chain, self._chained_from, self._tail.digest())


# Many records of `FILE.sums` at once.

cdef enum:
    RECORD = 64   # the size of a record: chain, hash, and others
    HASH = 16
    FLAGS = 44    # the offset of the last byte of its flags, less 3
    SUMMED = 56   # the size of what its sum covers, apart from page and stream id
    UNKNOWN = 1

cdef const uint8_t* ZEROS = b"\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0"


def digests_of(bytes records not None):
    """The hashes in packed records."""
    cdef Py_ssize_t count = len(records) // RECORD, at
    cdef bytes found = PyBytes_FromStringAndSize(NULL, count * HASH)
    cdef const char* source = PyBytes_AS_STRING(records)
    cdef char* target = PyBytes_AS_STRING(found)
    for at in range(count):
        memcpy(target + at * HASH, source + at * RECORD + HASH, HASH)
    return found


def chain_over(digests, Py_ssize_t first, Py_ssize_t stop, bytes chain not None):
    """The chain over the hashes of the pages from `first` up to, not including, `stop`, after
    `chain`; `digests` begins with that of page 0."""
    cdef const uint8_t[::1] view = digests
    cdef uint8_t[2 * HASH] both
    cdef Py_ssize_t at
    if len(chain) != HASH or first < 0 or stop * HASH > view.shape[0]:
        raise ValueError("the chain is over hashes that are not there")
    memcpy(both, PyBytes_AS_STRING(chain), HASH)
    for at in range(first, stop):
        memcpy(both + HASH, &view[at * HASH], HASH)
        xxh3_128_of_32(both, both)
    return PyBytes_FromStringAndSize(<char*>both, HASH)


def known_from(digests, Py_ssize_t stop):
    """The first of the consecutive pages before `stop` whose hash is known, not zeros."""
    cdef const uint8_t[::1] view = digests
    if stop * HASH > view.shape[0]:
        return stop
    while stop > 0 and memcmp(&view[(stop - 1) * HASH], ZEROS, HASH):
        stop -= 1
    return stop


def put_known(bytearray target not None, digests, Py_ssize_t first):
    """Replace the hashes in `target`, of the pages from `first` on, by those in `digests` that are
    known."""
    cdef const uint8_t[::1] view = digests
    cdef uint8_t* to = <uint8_t*>PyByteArray_AS_STRING(target)
    cdef Py_ssize_t page
    for page in range(first, min(first + len(target) // HASH, view.shape[0] // HASH)):
        if memcmp(&view[page * HASH], ZEROS, HASH):
            memcpy(to + (page - first) * HASH, &view[page * HASH], HASH)


cdef bint _is_whole(const uint8_t* record, uint64_t page, const uint8_t* stream_id) noexcept:
    cdef uint8_t[80] summed
    memcpy(summed, record, SUMMED)
    put_u64(summed + SUMMED, page)
    memcpy(summed + SUMMED + 8, stream_id, HASH)
    return xxh3_of_33_to_96(summed, 80) == get_u64(record + SUMMED)


def missing_in(bytes records not None, uint64_t first, bytes stream_id not None):
    """The pages whose packed records are not whole or say that the hash is not known. The first
    one is that of page `first`."""
    cdef const uint8_t* source = <const uint8_t*>PyBytes_AS_STRING(records)
    cdef Py_ssize_t at
    cdef list found = []
    if len(stream_id) != HASH:
        raise ValueError("a stream id has 16 bytes")
    for at in range(len(records) // RECORD):
        if (source[at * RECORD + FLAGS + 3] & UNKNOWN
                or not _is_whole(source + at * RECORD, first + at,
                                 <const uint8_t*>PyBytes_AS_STRING(stream_id))):
            found.append(first + at)
    return found


def chained_records(bytes records not None, uint64_t first, bytes stream_id not None,
                    bytes chain not None):
    """Packed records that are whole, with the chain in each that continues `chain`; and the last
    chain. The first one is that of page `first`."""
    cdef bytearray found = bytearray(records)
    cdef uint8_t* target = <uint8_t*>PyByteArray_AS_STRING(found)
    cdef uint8_t[2 * HASH] both
    cdef uint8_t[80] summed
    cdef Py_ssize_t at
    if len(stream_id) != HASH or len(chain) != HASH:
        raise ValueError("a stream id and a chain have 16 bytes")
    memcpy(both, PyBytes_AS_STRING(chain), HASH)
    memcpy(summed + SUMMED + 8, PyBytes_AS_STRING(stream_id), HASH)
    for at in range(len(records) // RECORD):
        memcpy(both + HASH, target + HASH, HASH)
        xxh3_128_of_32(both, both)
        memcpy(target, both, HASH)
        memcpy(summed, target, SUMMED)
        put_u64(summed + SUMMED, first + at)
        put_u64(target + SUMMED, xxh3_of_33_to_96(summed, 80))
        target += RECORD
    return bytes(found), PyBytes_FromStringAndSize(<char*>both, HASH)
