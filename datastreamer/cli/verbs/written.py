"""The stream that `append` and `split` write: a file's, or one that a server accepts.

Owns the options of a publisher, what commands write to in either case, and how a commit ends.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import cached_property, partial
from typing import Annotated, Any

import typer

from datastreamer.cli import early_signals
from datastreamer.cli.shared.addresses import address_of
from datastreamer.cli.shared.creation import CreationOptions
from datastreamer.cli.shared.exit_codes import Failure, WorkInterrupted, interruption
from datastreamer.cli.shared.json_input import InputLines
from datastreamer.cli.shared.options import TLSOptions, number_option, text_option
from datastreamer.cli.shared.signals import StopRequest
from datastreamer.client.blocking_client import BlockingClient
from datastreamer.errors import (
    HistoryChanged,
    NotWritten,
    OperationTooLarge,
    PeerError,
    StreamClosed,
)
from datastreamer.format import STREAM_TYPE_SEQUENCER, U32_MAX, Header
from datastreamer.publisher.blocking_publisher import BlockingOp, BlockingPublisher
from datastreamer.server.publish.policy import read_tokens
from datastreamer.storage.stream import DataStream

TargetArgument = Annotated[
    str,
    typer.Argument(
        metavar="FILE",
        help="Stream file, or server that accepts publishers: tcp://HOST:PORT, "
        "tcps://HOST:PORT with TLS, unix:PATH.",
    ),
]


@dataclass(frozen=True)
class PublisherOptions:
    """The options for a server, a group."""

    token_file: Annotated[
        str | None, text_option("FILE", "To a server: present the first token in this file.")
    ] = None
    epoch: Annotated[
        int | None,
        number_option(
            "N",
            "To a server: acquire the lease with this epoch, which fences publishers with lower "
            "epochs [the next epoch, if the lease is free].",
            least=1,
            most=(1 << 63) - 1,
        ),
    ] = None
    take_over: Annotated[
        bool,
        typer.Option(
            "--take-over", help="To a server: take the lease over from the publisher that holds it."
        ),
    ] = False
    next_entry: Annotated[
        int | None,
        number_option(
            "N",
            "To a server: begin the first operation at entry N; entries that the stream already "
            "holds are compared [the head].",
        ),
    ] = None
    retry_for: Annotated[
        int | None,
        number_option(
            "SECONDS",
            "To a server: reconnect to a lost server for up to this time [60].",
            most=U32_MAX,
        ),
    ] = None

    def check_unused(self, file: str) -> None:
        """Raises `typer.BadParameter` if an option is given: `file` is not a server."""
        for name, value in asdict(self).items():
            if value not in (None, False):
                option = f"--{name.replace('_', '-')}"
                raise typer.BadParameter(f"{option} is for tcp://HOST:PORT, and {file} is a file")


@contextmanager
def opened(
    target: str,
    lines: InputLines,
    creation: CreationOptions,
    publisher: PublisherOptions,
    tls: TLSOptions,
) -> Iterator[DataStream | RemoteStream]:
    """The stream that `lines` are written to; a bare HOST:PORT is a file's name.

    Raises `typer.BadParameter` for options that do not go with the target, and `Failure` if it
    cannot be opened, or when the server fails within the block.
    """
    if not target.startswith(("tcp://", "tcps://", "unix:")):
        publisher.check_unused(target)
        tls.check_unused(target)
        creation.check()
        with creation.open(target) as stream:
            yield stream
        return
    if creation != CreationOptions(stream_type=creation.stream_type):
        raise typer.BadParameter(
            "--create, --system-id and --stream-version are for files, and FILE is a server"
        )
    with RemoteStream(target, creation.stream_type, publisher, tls) as remote:
        try:
            yield remote
        except HistoryChanged as error:
            raise Failure(f"line {lines.number}: {error}") from error
        except PeerError as error:
            refused = isinstance(error, OperationTooLarge | NotWritten)
            doubt = "" if refused else remote.in_doubt()
            raise Failure(f"line {lines.number}: {error}{doubt}") from error


def held(stream: DataStream | RemoteStream) -> int:
    """The entries that the stream holds, by the last that is known of it."""
    if isinstance(stream, RemoteStream):
        # With --next-entry the operations may be some that it holds already.
        return max(stream.total_entries, stream.publisher.total_entries)
    return stream.total_entries


def commit(
    stream: DataStream | RemoteStream, lines: InputLines, work: Callable[[], dict[str, Any]]
) -> None:
    """Run `work`, which commits, and print what it returns and what the stream holds then.

    A signal waits until the result is known and printed, but for a server only a second.
    """
    first = stream.total_entries
    with StopRequest(stream.leave_soon if isinstance(stream, RemoteStream) else None) as stop:
        try:
            found = work()
        except StreamClosed as error:
            if not (stop.is_set() and isinstance(stream, RemoteStream)):
                raise
            text = (
                f"{early_signals.reason(stop.number)} at line {lines.number}, which the server did "
                f"not acknowledge within a second{stream.in_doubt()}"
            )
            raise WorkInterrupted(text, stop.number) from error
    entries = stream.total_entries - first
    lines.acknowledge(
        {**found, "first_entry": first, "entries": entries, "total_entries": held(stream)}
    )
    if stop.is_set():
        raise interruption(stop.number)


class RemoteStream:
    """A publisher as the part of `DataStream` and `AtomicOp` that commands use; a context manager
    that releases the lease."""

    def __init__(
        self, target: str, stream_type: int | None, options: PublisherOptions, tls: TLSOptions
    ) -> None:
        address = address_of(target)
        if options.epoch is not None and options.take_over:
            raise typer.BadParameter(
                "--epoch and --take-over exclude each other: --take-over uses the next epoch"
            )
        if not address.tls:
            tls.check_unused(target)
        kind = STREAM_TYPE_SEQUENCER if stream_type is None else stream_type
        context = tls.context() if address.tls else False
        name = tls.tls_server_name
        self._connect = partial(
            BlockingClient, *address[:2], stream_type=kind, tls=context, tls_server_name=name
        )
        self.publisher = BlockingPublisher(
            address.host,
            address.port,
            token=None if options.token_file is None else read_tokens(options.token_file)[0],
            stream_type=kind,
            epoch=options.epoch or 0,
            take_over=options.take_over,
            next_entry=options.next_entry,
            tls=context,
            tls_server_name=name,
            retry_for=60.0 if options.retry_for is None else float(options.retry_for),
        )
        self._op: BlockingOp | None = None

    def leave_soon(self) -> None:
        """Close the publisher in a second: calls that wait for the server raise `StreamClosed`.

        A signal's handler may call it.
        """
        timer = threading.Timer(1.0, self.publisher.close)
        timer.daemon = True
        timer.start()

    def in_doubt(self) -> str:
        """Advice about the operation that was sent last, if it was not acknowledged."""
        first = self.publisher.first_unacknowledged
        if first is None:
            return ""
        return (
            f"; the operation from entry {first} on may be in the stream: send it again with "
            f"--next-entry {first}, which compares it instead of appending it twice"
        )

    @cached_property
    def header(self) -> Header:
        """The header, which a publisher does not receive: that of a client."""
        with self._connect() as client:
            return client.header()

    @property
    def total_entries(self) -> int:
        return self.publisher.next_entry

    def atomic_op(self) -> RemoteStream:
        return self

    @property
    def is_open(self) -> bool:
        return self._op is not None

    @property
    def next_number(self) -> int:
        return self.total_entries if self._op is None else self._op.next_number

    def start_atomic_op(self) -> None:
        self._op = self.publisher.atomic_op()

    def add_entry(self, kind: int, data: bytes) -> None:
        assert self._op is not None
        self._op.add_entry(kind, data)

    def add_bookmark(self, key: bytes) -> None:
        assert self._op is not None
        self._op.add_bookmark(key)

    def commit_atomic_op(self) -> None:
        op, self._op = self._op, None
        assert op is not None
        op.commit()

    def rollback_atomic_op(self) -> None:
        op, self._op = self._op, None
        assert op is not None
        op.roll_back()

    def __enter__(self) -> RemoteStream:
        return self

    def __exit__(self, *_: object) -> None:
        self.publisher.close()
