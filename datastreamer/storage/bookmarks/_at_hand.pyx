"""Look-ups of bookmarks that follow each other without a wait, in memory and the index alone.

Owns that a result is of one state of both. Must not know the file or threads.
"""

from datastreamer.errors import IndexFailed


class NotAtHandError(Exception):
    """The look-up needs a repair first, not only memory and the index."""


cdef class LookUpsAtHand:
    """Look-ups that follow each other at once, at one state of the bookmarks, in memory and the
    index alone. Raises `NotAtHandError` if they need more; `end` releases the state.

    `memory` has the bookmarks of all entries that are not `indexed`, as of the reader's `state`.
    """

    def __init__(self, trusted, builder, dict memory not None, indexed, state):
        self._trusted, self._builder = trusted, builder
        self._memory, self._indexed, self._state = memory, indexed, state
        index = trusted.index
        if index is not None and indexed.entries:
            self._reading = index.reading()
            self._in_index = self._reading.newest

    cpdef bint hold_at(self, state) except -1:
        """Whether they see all bookmarks of the reader's `state`, and no others."""
        return (state is self._state and self._trusted.indexed is self._indexed
                and not self._trusted.recent.unfinished)

    cpdef object newest(self, bytes key):
        """The highest committed entry number that is a bookmark with this key."""
        found = self._memory.get(key)
        if found is not None:
            return found
        if self._in_index is not None:
            try:
                found = self._in_index(key)
            except IndexFailed:
                raise NotAtHandError from None
        if self._trusted.indexed is not self._indexed:
            # Bookmarks may have left the memory for a newer state of the index.
            raise NotAtHandError
        if found is None and self._builder.damage is not None:
            raise NotAtHandError
        return found

    def end(self):
        """Release the state."""
        if self._reading is not None:
            self._reading.end()
