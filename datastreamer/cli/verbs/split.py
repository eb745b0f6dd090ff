"""`datastreamer split`: payloads, as JSON lines on standard input, into messages in a stream.

Owns the lines' grammar, which takes what `reassemble` prints. A payload is one atomic
operation.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

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
from datastreamer.cli.shared.options import FileArgument, number_option
from datastreamer.cli.shared.output import json_line
from datastreamer.cli.shared.signals import stop_on_signal
from datastreamer.errors import CommitInDoubt, UsageError, WriteFailed
from datastreamer.format import MAX_DATA_SIZE, TYPE_BOOKMARK, U32_MAX
from datastreamer.reassembly.producer import MESSAGE_TYPE, Producer
from datastreamer.reassembly.splitter import PREFIX_SIZE, SMALLEST_LIMIT, Part
from datastreamer.storage.stream import DataStream

# A line is a payload, which is held in memory; one without an end must not fill it.
_MAX_LINE = 1 << 28
_SHAPE = (
    'a line is {"id": "0x..", "parts": [{"key": "0x..", "value": "0x.."}, ...], '
    '"blobs": {"0x..": "0x..", ...}}, parts or blobs or both'
)

MessageTypeOption = Annotated[
    int,
    number_option(
        "--type", "T", f"The type of the entries that hold messages [{MESSAGE_TYPE}].", most=U32_MAX
    ),
]
LimitOption = Annotated[
    int,
    number_option(
        "--limit",
        "BYTES",
        f"The largest message, key and value [{MAX_DATA_SIZE - 2}].",
        most=MAX_DATA_SIZE - 2,
        least=SMALLEST_LIMIT,
    ),
]


def split(
    file: FileArgument,
    create: CreateOption = False,
    system_id: SystemIdOption = None,
    stream_version: StreamVersionOption = None,
    stream_type: NewStreamTypeOption = None,
    type: MessageTypeOption = MESSAGE_TYPE,
    limit: LimitOption = MAX_DATA_SIZE - 2,
) -> None:
    """Cut payloads, JSON lines on standard input, into messages in a stream.

    A line is {"id": "0x..", "parts": [{"key": "0x..", "value": "0x.."}, ...]}, as `reassemble`
    prints it, or has "blobs": {"0x..": "0x.."}, which are cut where they are too long. Each is
    one atomic operation; a line is printed once it is on disk.
    """
    if type == TYPE_BOOKMARK:
        raise typer.BadParameter(f"--type {type} belongs to bookmarks")
    creation = Creation(create, system_id, stream_version, stream_type)
    read_line = standard_input("payloads", _MAX_LINE)
    with creation.open(file) as stream:
        _Splitting(stream, Producer(stream, type, limit)).take_all(read_line)


class _Splitting:
    """Takes lines and keeps count of them."""

    def __init__(self, stream: DataStream, producer: Producer) -> None:
        self._stream = stream
        self._producer = producer
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
            raise Failure(f"{how} after line {self._line}; {self._holds()}") from None
        except (BadLine, UsageError) as error:
            raise Failure(f"line {self._line}: {error}; {self._holds()}") from None
        except WriteFailed as error:
            # Where it is in doubt whether the payload is there, the error says all there is.
            done = "" if isinstance(error, CommitInDoubt) else f"; {self._holds()}"
            raise Failure(f"line {self._line}: {error}{done}") from error

    def _holds(self) -> str:
        return f"the stream holds {self._stream.total_entries} entries"

    def _take(self, line: bytes) -> None:
        what = value_of(line, _MAX_LINE, "more than a payload may have here")
        if what is None and not line.strip():
            return
        if not isinstance(what, dict) or set(what) not in _KEYS:
            raise BadLine(f"it is {shown(what)}; {_SHAPE}")
        parts = _parts_of(what.get("parts", []), what.get("blobs", {}))
        first = self._stream.total_entries
        # A signal waits until it is known, and said, whether the payload is there.
        with stop_on_signal() as ending:
            messages = self._producer.publish(bytes_of(what["id"]), parts)
        total = self._stream.total_entries
        self._say(
            {
                "id": what["id"],
                "messages": len(messages),
                "first_entry": first,
                "entries": total - first,
                "total_entries": total,
            }
        )
        if ending.is_set():
            raise KeyboardInterrupt

    def _say(self, what: dict[str, Any]) -> None:
        if not self._heard:
            return
        try:
            write_out(json_line(what))
        except BrokenPipeError:
            # What was asked for is that the payloads are written, heard of or not.
            self._heard = False


_KEYS = [{"id", "parts"}, {"id", "blobs"}, {"id", "parts", "blobs"}]


def _parts_of(parts: Any, blobs: Any) -> dict[bytes, Part]:
    """By prefix: the pairs of suffix and value, or the blob."""
    if not isinstance(parts, list) or not isinstance(blobs, dict):
        raise BadLine(f'"parts" is {shown(parts)}, "blobs" is {shown(blobs)}; {_SHAPE}')
    pairs: dict[bytes, list[tuple[bytes, bytes]]] = {}
    for part in parts:
        if not isinstance(part, dict) or set(part) != {"key", "value"}:
            raise BadLine(f"a part is {shown(part)}; {_SHAPE}")
        key = bytes_of(part["key"])
        pairs.setdefault(key[:PREFIX_SIZE], []).append((key[PREFIX_SIZE:], bytes_of(part["value"])))
    found: dict[bytes, Part] = dict(pairs)
    for name, blob in blobs.items():
        prefix = bytes_of(name)
        if prefix in found:
            raise BadLine(f"prefix {shown(name)} has a blob, and something else")
        found[prefix] = bytes_of(blob)
    return found
