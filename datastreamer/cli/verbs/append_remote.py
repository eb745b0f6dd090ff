"""`append tcp://...`: the stream that operations go to is a server's.

Owns what the options of a publisher mean, and gives `append` what it uses of a `DataStream`.
"""

from __future__ import annotations

from typing import Annotated, NamedTuple

import typer

from datastreamer.cli.shared.exit_codes import Failure
from datastreamer.cli.shared.options import NO_TLS, TLSOptions, number_option
from datastreamer.cli.shared.source import parse_address
from datastreamer.errors import UsageError
from datastreamer.format import STREAM_TYPE_SEQUENCER, U32_MAX
from datastreamer.publisher.blocking_publisher import BlockingOp, BlockingPublisher
from datastreamer.server.publish.policy import read_tokens

TargetArgument = Annotated[
    str,
    typer.Argument(
        metavar="FILE",
        help="The stream file; or a server that takes publishers: tcp://HOST:PORT, "
        "tcps://HOST:PORT with TLS, unix:PATH.",
    ),
]
TokenFileOption = Annotated[
    str | None,
    typer.Option(
        "--token-file", metavar="FILE", help="To a server: show the first token in this file."
    ),
]
EpochOption = Annotated[
    int | None,
    number_option(
        "--epoch",
        "N",
        "To a server: ask for the lease with this epoch, which fences sources with lower ones "
        "[the next, if nobody has the lease].",
        least=1,
        most=(1 << 63) - 1,
    ),
]
TakeOverOption = Annotated[
    bool,
    typer.Option("--take-over", help="To a server: take the lease from whoever has it."),
]
NextEntryOption = Annotated[
    int | None,
    number_option(
        "--next-entry",
        "N",
        "To a server: the first operation begins here; what is there already is compared "
        "[where the stream ends].",
    ),
]
RetryForOption = Annotated[
    int | None,
    number_option(
        "--retry-for", "S", "To a server: wait so long for one that is lost [60].", most=U32_MAX
    ),
]


class PublisherOptions(NamedTuple):
    """What is said about a server as the place of the stream; its fields are the options."""

    token_file: str | None = None
    epoch: int | None = None
    take_over: bool = False
    next_entry: int | None = None
    retry_for: int | None = None
    tls: TLSOptions = NO_TLS

    def check_unused(self, file: str) -> None:
        """Wrong usage where something is said and `file` is one."""
        self.tls.check_unused(file)
        for name, value in self._asdict().items():
            if name != "tls" and value not in (None, False):
                option = "--" + name.replace("_", "-")
                raise typer.BadParameter(f"{option} is for tcp://HOST:PORT, and {file} is a file")


def is_server(target: str) -> bool:
    """Whether `target` is a server's address; a bare HOST:PORT is a file's name."""
    return target.startswith(("tcp://", "tcps://", "unix:"))


class RemoteOp:
    """The operation that is open at the publisher, if one is."""

    def __init__(self, publisher: BlockingPublisher) -> None:
        self._publisher = publisher
        self.open: BlockingOp | None = None

    @property
    def is_open(self) -> bool:
        return self.open is not None

    @property
    def next_number(self) -> int:
        return self._publisher.next_entry if self.open is None else self.open.next_number

    def add_entry(self, kind: int, data: bytes) -> int:
        assert self.open is not None
        return self.open.add_entry(kind, data)

    def add_bookmark(self, key: bytes) -> int:
        assert self.open is not None
        return self.open.add_bookmark(key)


class RemoteStream:
    """What `append` uses of a stream, on a server; a context manager that ends the lease."""

    def __init__(self, target: str, stream_type: int | None, options: PublisherOptions) -> None:
        address = parse_address(target)
        assert address is not None
        if options.epoch is not None and options.take_over:
            raise typer.BadParameter("--epoch names the epoch, --take-over takes the next")
        if not address.tls:
            options.tls.check_unused(target)
        token = None
        if options.token_file is not None:
            try:
                token = read_tokens(options.token_file)[0]
            except UsageError as error:
                raise Failure(str(error)) from None
        self._publisher = BlockingPublisher(
            address.host,
            address.port,
            token=token,
            stream_type=STREAM_TYPE_SEQUENCER if stream_type is None else stream_type,
            epoch=options.epoch or 0,
            take_over=options.take_over,
            next_entry=options.next_entry,
            tls=options.tls.context() if address.tls else False,
            tls_server_name=options.tls.server_name,
            retry_for=60.0 if options.retry_for is None else float(options.retry_for),
        )
        self._op = RemoteOp(self._publisher)

    @property
    def total_entries(self) -> int:
        return self._publisher.next_entry

    def atomic_op(self) -> RemoteOp:
        return self._op

    def start_atomic_op(self) -> None:
        self._op.open = self._publisher.atomic_op()

    def commit_atomic_op(self) -> None:
        op, self._op.open = self._op.open, None
        assert op is not None
        op.commit()

    def rollback_atomic_op(self) -> None:
        op, self._op.open = self._op.open, None
        assert op is not None
        op.roll_back()

    @property
    def first_in_doubt(self) -> int | None:
        """Where the operation begins that was sent and not acknowledged, if there is one."""
        return self._publisher.first_unacknowledged

    def give_up(self) -> None:
        """Wait for a lost server no longer."""
        self._publisher.give_up()

    def __enter__(self) -> RemoteStream:
        return self

    def __exit__(self, *_: object) -> None:
        self._publisher.close()
