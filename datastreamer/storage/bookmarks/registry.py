"""The index backends by name: those of this package, and those that a program registers."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Final

from datastreamer.errors import BadArgument
from datastreamer.storage.bookmarks import fallback, lmdb, memory
from datastreamer.storage.bookmarks.interface import BookmarkIndex
from datastreamer.storage.disk.access import Access

IndexOpener = Callable[[str, bool, Access], BookmarkIndex]
"""Opens the index of the stream file at a path; the flag says whether it may write. Files that it
creates beside the stream have at most the permissions that the stream file's `Access` allows."""

LMDB_ANEW: Final = "lmdb-anew"
"""The backend "lmdb" that discards an existing index without opening it, for a rebuild."""

_openers: dict[str, IndexOpener] = {
    "lmdb": lmdb.open_index,
    LMDB_ANEW: partial(lmdb.open_index, anew=True),
    "memory": memory.open_index,
    fallback.LMDB_OR_MEMORY: fallback.open_index,
}


def register_index(name: str, opener: IndexOpener) -> None:
    """Register an index backend; `name` is the `index=` argument of `DataStream.open`."""
    _openers[name] = opener


def index_opener(name: str) -> IndexOpener:
    """The backend called `name`. Raises `BadArgument`, which lists the known ones."""
    try:
        return _openers[name]
    except KeyError:
        known = sorted(_openers)
        raise BadArgument(f"unknown bookmark index {name!r}; use one of {known}") from None
