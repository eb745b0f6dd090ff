"""The one cell that holds where a stream ends for its readers.

Owns that head, turn and page tables are replaced together. Knows nothing of what they mean:
`reader.py` reads by them, and the commit lane publishes heads.
"""

cimport cython


@cython.final
@cython.freelist(8)
cdef class SeenState:
    """What readers see at one moment; it never changes.

    `head` is the end of what is read. `turn` is the number of changes of entries, each counted at
    its begin and at its end, so it is odd while one runs. `pages` are the `page_directory.Pages`
    of this turn.
    """


cdef SeenState state_of(head, int64_t turn, pages):
    cdef SeenState state = SeenState.__new__(SeenState)
    state.head, state.turn, state.pages = head, turn, pages
    return state


@cython.final
cdef class HeadCell:
    """`now` is the `SeenState`: another object whenever one of its fields is another than before.

    For one thread at a time, which holds the lock of the stream's file; any thread reads `now`.
    """

    def __init__(self, head, pages):
        self.now = state_of(head, 0, pages)

    cpdef publish(self, head):
        """Move the head within the turn."""
        cdef SeenState before = self.now
        self.now = state_of(head, before.turn, before.pages)

    def change(self, head, turn, pages):
        """Begin, end or count a change."""
        self.now = state_of(head, turn, pages)
