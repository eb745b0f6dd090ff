"""`datastreamer append`: atomic operations from JSON lines on standard input.

Owns the lines' grammar. An operation begins with its first line and ends with a commit or
a rollback; whatever ends the program before that rolls it back.
"""

from __future__ import annotations

from collections.abc import Callable

import typer

from datastreamer.cli.shared.creation import (
    CreateOption,
    Creation,
    NewStreamTypeOption,
    StreamVersionOption,
    SystemIdOption,
)
from datastreamer.cli.shared.exit_codes import Failure, Terminated, write_out
from datastreamer.cli.shared.json_input import BadLine, bytes_of, shown, standard_input, value_of
from datastreamer.cli.shared.options import (
    NO_TLS,
    TLSOptions,
)
from datastreamer.cli.shared.output import json_line
from datastreamer.cli.shared.signals import stop_on_signal
from datastreamer.cli.verbs.append_remote import (
    EpochOption,
    NextEntryOption,
    PublisherOptions,
    RemoteOp,
    RemoteStream,
    RetryForOption,
    TakeOverOption,
    TargetArgument,
    TokenFileOption,
    is_server,
)
from datastreamer.errors import (
    CommitInDoubt,
    HistoryChanged,
    PeerError,
    UsageError,
    WriteFailed,
)
from datastreamer.format import MAX_DATA_SIZE, TYPE_BOOKMARK
from datastreamer.storage.stream import DataStream
from datastreamer.storage.write.atomic_op import AtomicOp

# Twice the largest entry's hex; a line without an end must not fill the memory.
_MAX_LINE = 4 * MAX_DATA_SIZE
_EVENT = (("type", "data"), ("data", "type"))
_SHAPES = (
    'a line is {"bookmark": "0x.."}, {"type": 3, "data": "0x.."}, {"commit": true} or '
    '{"rollback": true}'
)


def append(
    file: TargetArgument,
    create: CreateOption = False,
    system_id: SystemIdOption = None,
    stream_version: StreamVersionOption = None,
    stream_type: NewStreamTypeOption = None,
    token_file: TokenFileOption = None,
    epoch: EpochOption = None,
    take_over: TakeOverOption = False,
    next_entry: NextEntryOption = None,
    retry_for: RetryForOption = None,
    tls: TLSOptions = NO_TLS,
) -> None:
    """Append atomic operations that come as JSON lines on standard input.

    {"bookmark": "0x.."} and {"type": 3, "data": "0x.."} add an entry, {"commit": true} makes
    what was added since the last commit part of the stream and prints a line once it is on
    disk, {"rollback": true} forgets it.
    """
    options = PublisherOptions(
        token_file,
        epoch,
        take_over,
        next_entry,
        retry_for,
        tls,
    )
    if is_server(file):
        if create or system_id is not None or stream_version is not None:
            raise typer.BadParameter("--create and what goes with it are for files")
        read_line = standard_input("operations", _MAX_LINE)
        with RemoteStream(file, stream_type, options) as remote:
            _Appender(remote).take_all(read_line)
        return
    options.check_unused(file)
    creation = Creation(create, system_id, stream_version, stream_type)
    read_line = standard_input("operations", _MAX_LINE)
    with creation.open(file) as stream:
        _Appender(stream).take_all(read_line)


class _Appender:
    """Takes lines and keeps count of them."""

    def __init__(self, stream: DataStream | RemoteStream) -> None:
        self._stream = stream
        self._op: AtomicOp | RemoteOp = stream.atomic_op()
        self._line = 0
        self._heard = True

    def take_all(self, read_line: Callable[[], bytes]) -> None:
        """Every line, up to the end of the input or the first that is wrong."""
        try:
            while line := read_line():
                self._line += 1
                self._take(line)
        except KeyboardInterrupt as error:
            how = "ended by SIGTERM" if isinstance(error, Terminated) else "interrupted"
            raise Failure(f"{how} after line {self._line}; {self._rolled_back()}") from None
        except (BadLine, UsageError) as error:
            raise Failure(f"line {self._line}: {error}; {self._rolled_back()}") from None
        except WriteFailed as error:
            # Where it is in doubt whether the operation is there, the error says all there is.
            done = "" if isinstance(error, CommitInDoubt) else f"; {self._rolled_back()}"
            raise Failure(f"line {self._line}: {error}{done}") from error
        except HistoryChanged as error:
            raise Failure(f"line {self._line}: {error}") from error
        except PeerError as error:
            raise Failure(f"line {self._line}: {error}{self._in_doubt()}") from error
        if self._op.is_open:
            raise Failure(
                f"the input ended after line {self._line} without a commit; {self._rolled_back()}"
            )

    def _in_doubt(self) -> str:
        """What is not known of the operation that was sent last."""
        remote = self._stream
        first = remote.first_in_doubt if isinstance(remote, RemoteStream) else None
        if first is None:
            return ""
        return (
            f"; the operation from entry {first} on may be there: sent again with --next-entry "
            f"{first} it is compared, and not doubled"
        )

    def _rolled_back(self) -> str:
        """Roll back what is open; says what was done and how the stream stands."""
        holds = f"the stream holds {self._stream.total_entries} entries"
        if not self._op.is_open:
            return f"no operation was open, {holds}"
        count = self._op.next_number - self._stream.total_entries
        entries = "1 entry" if count == 1 else f"{count} entries"
        try:
            self._stream.rollback_atomic_op()
        except CommitInDoubt as error:
            return f"the open operation ({entries}) may be in the stream all the same: {error}"
        return f"the open operation ({entries}) was rolled back, {holds}"

    def _take(self, line: bytes) -> None:
        what = value_of(line, _MAX_LINE, "more than any entry needs")
        if what is None and not line.strip():
            return
        keys = tuple(what) if type(what) is dict else ()
        if keys in _EVENT:
            kind, data = what["type"], bytes_of(what["data"])
            if type(kind) is not int:  # a bool is one, for most purposes
                raise BadLine(f"an entry type is a number, not {shown(kind)}")
            if kind == TYPE_BOOKMARK:
                raise BadLine(
                    f"entry type {kind} belongs to bookmarks; they are added as "
                    '{"bookmark": "0x.."}'
                )
            self._begin()
            self._op.add_entry(kind, data)
        elif keys == ("bookmark",):
            key = bytes_of(what["bookmark"])
            self._begin()
            self._op.add_bookmark(key)
        elif keys == ("commit",) and what["commit"] is True:
            self._commit()
        elif keys == ("rollback",) and what["rollback"] is True:
            if self._op.is_open:
                self._stream.rollback_atomic_op()
        else:
            raise BadLine(f"it is {shown(what)}; {_SHAPES}")

    def _begin(self) -> None:
        if not self._op.is_open:
            self._stream.start_atomic_op()

    def _commit(self) -> None:
        first = self._stream.total_entries
        # A signal waits until it is known, and said, whether the operation is there; but not
        # for a server that is gone.
        remote = self._stream if isinstance(self._stream, RemoteStream) else None
        with stop_on_signal(None if remote is None else remote.give_up) as ending:
            if self._op.is_open:
                self._stream.commit_atomic_op()
        total = self._stream.total_entries
        self._say({"first_entry": first, "entries": total - first, "total_entries": total})
        if ending.is_set():
            raise KeyboardInterrupt

    def _say(self, what: dict[str, int]) -> None:
        if not self._heard:
            return
        try:
            write_out(json_line(what))
        except BrokenPipeError:
            # What was asked for is that the operations are written, heard of or not.
            self._heard = False
        except OSError as error:
            first, total = what["first_entry"], what["total_entries"]
            raise Failure(
                f"{error.filename}: {error.strerror}; line {self._line} is done: the operation "
                f"from entry {first} on is in the stream, which holds {total} entries"
            ) from error
