"""The Go reference implementation's side of the benchmarks.

Each method starts it fresh, lets it do one kind of work, and ends it. What is read
over the network is read by the same raw readers as ours. Needs go; the fixture
`reference` is None where it is missing.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from bench.measure import Done, Latencies
from bench.readers import LiveReaders, Stalled, catch_up, point_reads
from tests.interop.peer import GoPeer, build


class Reference:
    """The rival; `folder` is where its stream files go (no dot in its path)."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._serial = itertools.count()
        build()

    def _fresh(self) -> Path:
        return self.folder / f"reference{next(self._serial)}.bin"

    @contextmanager
    def serving(
        self, path: Path | None = None, *, entries: int = 0, size: int = 200
    ) -> Iterator[GoPeer]:
        """Its server over the stream file `path` (one of ours will do; the reference
        writes to it, and its own bookmark folder beside it), or over a new one with
        `entries` entries of `size` bytes of data."""
        with GoPeer.serve(path or self._fresh()) as server:
            if path is None and entries:
                server.append(1, entries, size)
            yield server

    def append(
        self, operations: int, entries: int = 5, size: int = 200, *, bookmarks: bool = False
    ) -> Done:
        """Operations of `entries` entries, each waited for, in its own process, not
        synced. Counts entries; divide by `entries` for operations. One operation of
        many entries is its bulk append."""
        path = self._fresh()
        with GoPeer.serve(path) as server:
            server.timeout = 300
            answer = server.append(operations, entries, size, bookmarks=bookmarks)
        path.unlink()
        return Done(answer["entries"], answer["seconds"])

    def catch_up(self, server: GoPeer, entries: int, size: int = 200) -> Done:
        """Its server alone: a plain socket reader takes everything."""
        return catch_up(server.address, entries=entries, size=size)

    def client_catch_up(self, address: tuple[str, int], entries: int) -> Done:
        """Its client, decoding, from any server: its own or ours."""
        answer = GoPeer.read(address, count=entries, digest=False, timeout=300)
        return Done(answer["entries"], answer["seconds"])

    def point_reads(self, server: GoPeer, numbers: Iterable[int], size: int = 200) -> list[float]:
        """Its server, one connection, entry by number, waited; seconds of each."""
        return point_reads(server.address, numbers, size=size)

    def live(
        self,
        *,
        clients: int,
        rate: int,
        operations: int,
        entries: int = 5,
        size: int = 200,
        timeout: float = 120.0,
        stalled: int = 0,
    ) -> Latencies:
        """From commit to receipt, `rate` operations a second to `clients` raw readers
        (100 at most, with those that are `stalled`: it refuses more)."""
        with (
            self.serving() as server,
            Stalled(server.address, clients=stalled),
            LiveReaders(
                server.address,
                clients=clients,
                operations=operations,
                start=0,
                entries=entries,
                size=size,
                timeout=timeout,
            ) as readers,
        ):
            server.timeout = timeout
            server.append(operations, entries, size, rate=rate)
            return readers.result()


def some_numbers(entries: int, count: int, seed: int = 1) -> list[int]:
    """`count` entry numbers of a stream of `entries`, at random, the same each time."""
    return random.Random(seed).choices(range(entries), k=count)
