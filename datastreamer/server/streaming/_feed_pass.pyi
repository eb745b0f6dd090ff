from collections.abc import Sequence

def fan_out(
    fds: Sequence[int], data: bytes | bytearray | memoryview, budget_ns: int
) -> list[int]: ...
