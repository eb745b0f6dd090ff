"""The hashes of a stream's entries up to an end that advances, page by page.

`hashes.py` says what is hashed. Knows bytes and file offsets, and neither files nor where hashes
are stored.
"""

cimport cython
from cpython.buffer cimport PyBUF_SIMPLE, PyBuffer_Release, PyObject_GetBuffer
from libc.stdint cimport int64_t, uint8_t

from datastreamer._entry cimport HEAD_SIZE, HEADER_PAGE_SIZE, PAGE_SIZE, get_u64

from xxhash import xxh3_128

from datastreamer.storage.sums.hashes import NO_CHAIN, EndSum, PageHash, chained


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
