# The docstrings of _wire.pyx describe this class.

from collections.abc import Sequence
from typing import Any, Generic, NamedTuple, TypeVar

from _typeshed import ReadableBuffer

from datastreamer.zkevm.schema import Message

_T = TypeVar("_T", bound=NamedTuple)

class MessageCodec(Generic[_T]):
    def __init__(self, message: Message) -> None: ...
    @property
    def cls(self) -> type[_T]: ...
    @property
    def name(self) -> str: ...
    def read(self, data: ReadableBuffer) -> _T: ...
    def write(self, values: Sequence[Any]) -> bytes: ...
