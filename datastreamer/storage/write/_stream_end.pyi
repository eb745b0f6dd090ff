from collections.abc import Sequence
from mmap import mmap

from datastreamer._packer import EntryPacker
from datastreamer.storage.disk._commit import CommitFile
from datastreamer.storage.header.records import Head
from datastreamer.storage.pages._page_sums import PageSums
from datastreamer.storage.pages.hashes import EndSum

class StreamEnd:
    written: Head
    base: Head
    mid: Head
    base_sum: EndSum
    mid_sum: EndSum
    sums: PageSums
    commits: int
    durable: int
    sequence: int
    def __init__(self, file: CommitFile, page: bytearray, head: Head, sums: PageSums) -> None: ...
    def count_in(self, memory: mmap | bytearray | None) -> None: ...
    def synced_in(self, ns: int) -> None: ...
    def refused(self) -> None: ...
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
