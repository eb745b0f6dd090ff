# The docstring of _queries.pyx says the contract.

from typing import TypeAlias

from datastreamer.protocol.commands import HeaderQuery

Asked: TypeAlias = int | bytes | HeaderQuery

def queries_in(buffer: bytes, at: int, stream_type: int, most: int) -> tuple[list[Asked], int]: ...
