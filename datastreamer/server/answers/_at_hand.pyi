# The docstring of _at_hand.pyx says the contract.

from collections.abc import Callable, Container

from datastreamer.protocol._queries import Asked
from datastreamer.server.answers.bookmark_queries import BookmarkQueries
from datastreamer.storage.read._at_hand import ReadsAtHand
from datastreamer.storage.read._head import SeenState

def answers_at_hand(
    queries: list[Asked],
    reads: ReadsAtHand,
    state: SeenState,
    pages: Container[int],
    bookmarks: BookmarkQueries,
    header: Callable[[], bytes],
    answers: list[bytes],
    most_bytes: int,
) -> tuple[int, int, int]: ...
