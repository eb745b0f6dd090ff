"""`datastreamer append`: atomic operations from JSON lines on standard input.

Owns the grammar of the lines. The first line after a commit begins an operation; if the
command ends before its commit, the operation is rolled back.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import typer

from datastreamer.archive.beside import archiving
from datastreamer.cli.shared.creation import CreationOptions
from datastreamer.cli.shared.exit_codes import Failure
from datastreamer.cli.shared.json_input import BadLine, InputLines, bytes_of, shown
from datastreamer.cli.shared.options import Key, TLSOptions
from datastreamer.cli.verbs.archive.arguments import ArchiveGroup
from datastreamer.cli.verbs.written import (
    PublisherOptions,
    RemoteStream,
    TargetArgument,
    commit,
    held,
    opened,
)
from datastreamer.errors import CommitInDoubt
from datastreamer.format import MAX_DATA_SIZE, TYPE_BOOKMARK
from datastreamer.printable import counted
from datastreamer.storage.stream import DataStream
from datastreamer.storage.write.atomic_op import AtomicOp

# Twice the hex of the largest entry.
_MAX_LINE = 4 * MAX_DATA_SIZE
# What `cat --json` prints of an entry, which a line may have as well.
_PRINTED = {"number", "type", "length", "data", "text", "kind", "fields", "time"}
_SHAPES = (
    'a line is {"bookmark": KEY}, {"type": 3, "data": "0x.."}, {"type": 3, "text": ".."}, '
    '{"commit": true} or {"rollback": true}'
)


def append(
    target: TargetArgument,
    *,
    creation: CreationOptions,
    archive: ArchiveGroup,
    publisher: PublisherOptions,
    tls: TLSOptions,
) -> None:
    """Append atomic operations, read as JSON lines.

    {"bookmark": KEY} and {"type": 3, "data": "0x.."} or {"type": 3, "text": ".."} add an entry,
    {"commit": true} commits the entries since the last commit and prints a line when they are
    durable, {"rollback": true} discards them. KEY is 0x..., block:N, batch:N or text. Reads
    lines from standard input. Entries with a number, as `cat --json` prints them, get new numbers,
    and the end of the input commits them.

    Examples:
      datastreamer append stream.bin --create < operations.jsonl
      datastreamer cat a.bin --json | datastreamer append b.bin --create
    """
    lines = InputLines("operations", _MAX_LINE)
    archived = archive.options()
    with opened(target, lines, creation, publisher, tls) as stream, ExitStack() as ending:
        if isinstance(stream, DataStream):
            ending.enter_context(archiving(stream, archived))
        elif archived is not None:
            raise typer.BadParameter("--archive is for files, and FILE is a server")
        _Appender(stream, lines).run()


class _Appender:
    """Applies lines to a stream."""

    def __init__(self, stream: DataStream | RemoteStream, lines: InputLines) -> None:
        self._stream = stream
        self._op: AtomicOp | RemoteStream = stream.atomic_op()
        self._lines = lines
        # Whether all entries of the open operation were printed by `cat`.
        self._copied = True

    def run(self) -> None:
        self._lines.process(self._apply, self._roll_back)
        if self._op.is_open and self._copied:
            self._commit()
        elif self._op.is_open:
            number = self._lines.number
            raise Failure(
                f"the input ended after line {number} without a commit; {self._roll_back()}"
            )

    def _roll_back(self) -> str:
        """Roll back the open operation; says what was done and what the stream holds."""
        holds = f"the stream holds {counted(held(self._stream))}"
        if not self._op.is_open:
            return f"no operation was open, {holds}"
        count = self._op.next_number - self._stream.total_entries
        entries = counted(count)
        try:
            self._stream.rollback_atomic_op()
        except CommitInDoubt as error:
            return f"the open operation ({entries}) may be in the stream nevertheless: {error}"
        return f"the open operation ({entries}) was rolled back, {holds}"

    def _apply(self, what: Any) -> None:
        keys = what.keys() if type(what) is dict else set()
        if keys <= _PRINTED and "type" in keys and len(keys & {"data", "text"}) == 1:
            kind, data = what["type"], _payload(what)
            if type(kind) is not int:  # isinstance would accept a bool
                raise BadLine(f"an entry type is a number, not {shown(kind)}")
            self._begin(copied="number" in keys)
            if kind == TYPE_BOOKMARK:
                self._op.add_bookmark(data)
            else:
                self._op.add_entry(kind, data)
        elif keys == {"bookmark"}:
            key = self._key(what["bookmark"])
            self._begin()
            self._op.add_bookmark(key)
        elif keys == {"commit"} and what["commit"] is True:
            self._commit()
        elif keys == {"rollback"} and what["rollback"] is True:
            if self._op.is_open:
                self._stream.rollback_atomic_op()
        else:
            raise BadLine(f"it is {shown(what)}; {_SHAPES}")

    def _begin(self, *, copied: bool = False) -> None:
        if not self._op.is_open:
            self._stream.start_atomic_op()
            self._copied = True
        self._copied = self._copied and copied

    def _key(self, text: object) -> bytes:
        if not isinstance(text, str):
            raise BadLine(f"{shown(text)} is not a key: a text, 0x... in hex, block:N or batch:N")
        try:
            key = Key(text)
            return key.of(self._stream.header.version if key.needs_version else 0)
        except typer.BadParameter as error:
            raise BadLine(str(error)) from None

    def _commit(self) -> None:
        def work() -> dict[str, Any]:
            if self._op.is_open:
                self._stream.commit_atomic_op()
            return {}

        commit(self._stream, self._lines, work)


def _payload(entry: dict[str, Any]) -> bytes:
    if "data" in entry:
        return bytes_of(entry["data"])
    text = entry["text"]
    if not isinstance(text, str):
        raise BadLine(f"{shown(text)} is not a text")
    try:
        return text.encode()
    except UnicodeEncodeError:
        raise BadLine("the text has half of a surrogate pair, which UTF-8 cannot have") from None
