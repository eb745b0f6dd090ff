# The contracts stand in the docstrings of _placement.pyx.

from collections.abc import Sequence

from _typeshed import ReadableBuffer

class Placement:
    def __init__(
        self, fd: int, arena: ReadableBuffer, segments: Sequence[tuple[int, int, int]]
    ) -> None: ...
    def finish(self) -> None: ...
    def drop(self) -> None: ...
