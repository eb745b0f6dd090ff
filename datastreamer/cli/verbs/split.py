"""`datastreamer split`: payloads from JSON lines on standard input, as messages in a stream.

Owns the grammar of the lines, which are those that `reassemble` prints. A payload is one
atomic operation.
"""

from __future__ import annotations

from typing import Annotated, Any

import typer

from datastreamer.cli.shared.creation import CreationOptions
from datastreamer.cli.shared.json_input import BadLine, InputLines, bytes_of, shown
from datastreamer.cli.shared.options import TLSOptions, number_option
from datastreamer.cli.verbs.written import (
    PublisherOptions,
    RemoteStream,
    TargetArgument,
    commit,
    held,
    opened,
)
from datastreamer.format import MAX_DATA_SIZE, TYPE_BOOKMARK, U32_MAX
from datastreamer.printable import counted
from datastreamer.reassembly.producer import MESSAGE_TYPE, Producer
from datastreamer.reassembly.splitter import PREFIX_SIZE, SMALLEST_LIMIT, Part

# A line is one payload, and is held in memory.
_MAX_LINE = 1 << 28
_SHAPE = (
    'a line is {"id": "0x..", "parts": [{"key": "0x..", "value": "0x.."}, ...], '
    '"blobs": {"0x..": "0x..", ...}}, with parts or blobs or both'
)

MessageTypeOption = Annotated[int, number_option("T", "Entry type of messages.", most=U32_MAX)]
LimitOption = Annotated[
    int,
    number_option(
        "BYTES",
        "Maximum size of a message, key and value.",
        most=MAX_DATA_SIZE - 2,
        least=SMALLEST_LIMIT,
    ),
]


def split(
    target: TargetArgument,
    *,
    creation: CreationOptions,
    publisher: PublisherOptions,
    tls: TLSOptions,
    type: MessageTypeOption = MESSAGE_TYPE,
    limit: LimitOption = MAX_DATA_SIZE - 2,
) -> None:
    """Split payloads, read as JSON lines, into messages.

    The payloads are read from standard input. A line is {"id": "0x..", "parts": [{"key":
    "0x..", "value": "0x.."}, ...]}, as `reassemble` prints it, or has "blobs": {"0x..":
    "0x.."}, which are cut to fit into messages. Each payload is one atomic operation; a line is
    printed when it is durable. "block", which `reassemble --order` prints, is ignored.

    Examples:
      datastreamer split stream.bin --create < payloads.jsonl
      datastreamer reassemble a.bin b.bin | datastreamer split c.bin --create
    """
    if type == TYPE_BOOKMARK:
        raise typer.BadParameter(f"--type {type} is the entry type of bookmarks")
    lines = InputLines("payloads", _MAX_LINE)
    with opened(target, lines, creation, publisher, tls) as stream:
        written = stream.publisher if isinstance(stream, RemoteStream) else stream
        producer = Producer(written, type, limit)

        def publish(what: Any) -> None:
            if isinstance(what, dict) and "rolled_back" in what:
                raise BadLine("it rolls payloads back; a stream keeps what was appended")
            if not isinstance(what, dict) or {*what} - {"block"} not in _KEYS:
                raise BadLine(f"it is {shown(what)}; {_SHAPE}")
            own = bytes_of(what["id"])
            parts = _parts_of(what.get("parts", []), what.get("blobs", {}))
            commit(
                stream,
                lines,
                lambda: {"id": what["id"], "messages": len(producer.publish(own, parts))},
            )

        lines.process(publish, lambda: f"the stream holds {counted(held(stream))}")


_KEYS = [{"id", "parts"}, {"id", "blobs"}, {"id", "parts", "blobs"}]


def _parts_of(parts: Any, blobs: Any) -> dict[bytes, Part]:
    """The pairs of suffix and value, or the blob, by prefix."""
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
            raise BadLine(f"prefix {shown(name)} has a blob and other parts, or two blobs")
        found[prefix] = bytes_of(blob)
    return found
