from collections.abc import Sequence

STEP_DATA: int
STEP_HEADER: int
STEP_SYNC: int
STEP_MARK: int

class CommitStepFailed(OSError):
    step: int

def write_commit(
    fd: int,
    arena: bytes | bytearray | memoryview,
    segments: Sequence[tuple[int, int, int]],
    page: bytes | bytearray | memoryview,
    before: tuple[int, int],
    after: tuple[int, int],
    sync: bool,
    wakers: Sequence[int],
) -> None: ...
