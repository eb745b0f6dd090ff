# The docstrings are in _placement.pyx.

from collections.abc import Sequence

from _typeshed import ReadableBuffer

class Placer:
    def __init__(self) -> None: ...
    def runs(self) -> bool: ...

class Placement:
    def __init__(
        self,
        fd: int,
        arena: ReadableBuffer,
        segments: Sequence[tuple[int, int, int]],
        placer: Placer | None = None,
    ) -> None: ...
    @property
    def ended(self) -> bool: ...
    def finish(self) -> None: ...
    def drop(self) -> None: ...
