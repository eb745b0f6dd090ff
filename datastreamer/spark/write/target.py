"""Where the rows of a write go: a stream file of the driver's machine, or the stream of a server.

Owns how an operation that is in the stream is recognized when its write is repeated. Each of them
begins with a bookmark, its fence, which is made of the query, the batch and the operation.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, Final, NamedTuple, Protocol

from datastreamer.client.blocking_client import BlockingClient
from datastreamer.errors import (
    BadFromBookmark,
    ConnectFailed,
    SourceBusy,
    UnknownBookmark,
    UsageError,
)
from datastreamer.publisher.blocking_publisher import BlockingPublisher
from datastreamer.spark.options import Options
from datastreamer.spark.read.servers import Failover, Servers
from datastreamer.spark.write import rows
from datastreamer.storage.stream import DataStream

# A fence is a bookmark message of the protobuf schema, with only an unknown field: 15, of 14 bytes.
# So programs that decode bookmarks take it for one without a type.
_FIELD: Final = b"\x7a\x0e"


@dataclass(frozen=True, slots=True)
class Fences:
    """Of one batch of a query, or of one version of an application."""

    query: str
    batch: int

    def key(self, operation: int) -> bytes:
        """The bookmark of an operation: 16 bytes."""
        text = f"{self.query}\0{self.batch}\0{operation}"
        return _FIELD + blake2b(text.encode(), digest_size=14).digest()


class Output(Protocol):
    """A stream that operations are appended to. No other process appends meanwhile."""

    def has_bookmark(self, key: bytes) -> bool: ...

    def atomic_op(self) -> Any: ...

    def sync(self) -> None: ...


def append(output: Output, batches: Iterator[Any], fences: Fences | None) -> None:
    """Append packed rows, and return when they are on disk: of a repeated batch only the operations
    that are not in the stream."""
    repeated = fences is not None
    for number, operation in rows.operations(batches):
        key = None if fences is None else fences.key(number)
        # They are appended in the order of their numbers.
        repeated = repeated and key is not None and output.has_bookmark(key)
        if repeated:
            continue
        with output.atomic_op() as op:
            if key is not None:
                op.add_bookmark(key)
            for batch in operation:
                rows.add(op, batch)
            op.commit(wait=False)
    output.sync()


class _FileOutput(NamedTuple):
    stream: DataStream

    def has_bookmark(self, key: bytes) -> bool:
        try:
            self.stream.bookmark(key)
        except UnknownBookmark:
            return False
        return True

    def atomic_op(self) -> Any:
        return self.stream.atomic_op()

    def sync(self) -> None:
        self.stream.sync()


@contextmanager
def file_output(path: str) -> Iterator[Output]:
    """The file of a stream that exists. Raises what `DataStream.open` raises."""
    with DataStream.open(path) as stream:
        yield _FileOutput(stream)


class _ServerOutput(NamedTuple):
    publisher: BlockingPublisher
    client: BlockingClient

    def has_bookmark(self, key: bytes) -> bool:
        # (A query of the bookmark itself finds it only if an event follows.)
        try:
            with self.client.batches(from_bookmark=key) as batches:
                next(batches)
        except BadFromBookmark:
            return False
        return True

    def atomic_op(self) -> Any:
        return self.publisher.atomic_op()

    def sync(self) -> None:
        self.publisher.flush()


@contextmanager
def server_output(options: Options) -> Iterator[Output]:
    """The stream of a server that lets this process publish. While another process does, waits for
    `retry_for` seconds. Raises what `BlockingPublisher` raises."""
    servers = Servers.of(options)
    address, *others = servers.addresses
    if others:
        raise UsageError("option server: a stream is written to one server: name only that")
    failover = Failover(servers, 0)
    with ExitStack() as opened:
        while True:
            try:
                publisher = BlockingPublisher(
                    address.host,
                    address.port,
                    token=servers.token(),
                    stream_type=options.stream_type,
                    timeout=options.timeout,
                    tls=servers.context() or address.tls,
                    tls_server_name=None if options.tls is None else options.tls.server_name,
                    retry_for=options.retry_for,
                )
                break
            except (SourceBusy, ConnectFailed) as error:
                failover.failed(error)
        opened.enter_context(publisher)
        client = opened.enter_context(servers.connect(address))
        yield _ServerOutput(publisher, client)
