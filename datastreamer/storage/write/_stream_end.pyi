from collections.abc import Callable, Iterable, Sequence
from mmap import mmap
from typing import Any, NoReturn, Protocol, TypeAlias

from datastreamer._packer import EntryPacker
from datastreamer.storage.bookmarks.keeper import BookmarkKeeper
from datastreamer.storage.disk._commit import CommitFile
from datastreamer.storage.header.records import CommitLayout, Head
from datastreamer.storage.pages._page_sums import PageSums
from datastreamer.storage.pages.hashes import EndSum

Buffer: TypeAlias = bytes | bytearray | memoryview

class Committer(Protocol):
    def not_committed(self, error: OSError) -> NoReturn: ...
    def pages_finished(self) -> None: ...

class Owned(Protocol):
    @property
    def interrupted(self) -> bool: ...

class Writer(Committer, Protocol):
    end: StreamEnd
    @property
    def owned(self) -> Owned: ...

class StreamEnd:
    written: Head
    base: Head
    mid: Head
    base_sum: EndSum
    mid_sum: EndSum
    sums: PageSums
    unfinished: bool
    limit: int
    synced: bool
    hidden: bool
    commits: int
    durable: int
    sequence: int
    def count_in(self, memory: mmap | bytearray | None) -> None: ...
    def synced_in(self, ns: int) -> None: ...
    def refused(self) -> None: ...
    @property
    def look_due(self) -> bool: ...
    def looking(self) -> int: ...
    def looked(self, began: int, seconds: float) -> None: ...
    def look_again(self) -> None: ...
    @property
    def ready(self) -> bool: ...
    def commit_on(self, packer: EntryPacker, writer: Committer, wait: bool) -> Head | None: ...
    def __init__(
        self,
        file: CommitFile,
        page: bytearray,
        head: Head,
        sums: PageSums,
        layout: CommitLayout,
    ) -> None: ...
    def belong_to(self, owner: Any) -> None: ...
    def all_on_disk(self, head: Head) -> None: ...
    def put(
        self,
        base: Head,
        mid: Head,
        after: Head,
        base_sum: EndSum,
        mid_sum: EndSum,
        after_sum: EndSum,
        seen: Head,
    ) -> None: ...
    def commit(
        self,
        packer: EntryPacker,
        placed: PageSums | None,
        seen: Head | None,
        sync: bool,
        wakers: Sequence[int],
    ) -> Head: ...

class Appender:
    lease: object
    committing: bool
    commit_guard: Callable[[], None] | None
    def __init__(
        self,
        packer: EntryPacker,
        writer: Writer | None,
        keeper: BookmarkKeeper | None,
    ) -> None: ...

class Appending:
    _appender: Appender
    def append(self, type: int, data: Buffer, *, bookmark: Buffer | None = None) -> int: ...
    def append_many(
        self,
        type: int | Sequence[int],
        data: Iterable[Buffer],
        *,
        bookmark: Buffer | None = None,
    ) -> range: ...
