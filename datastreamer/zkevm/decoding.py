"""Entries to events and back: the format of an entry, by its type and the stream's version.

Owns the choice between the fixed layouts of version 1 and the messages of later versions.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final, TypeAlias

from datastreamer._codec import Entry, EntryBatch
from datastreamer.errors import BadEvent, DecodeFailed
from datastreamer.zkevm import events, fixed
from datastreamer.zkevm._wire import MessageCodec
from datastreamer.zkevm.schema import FIRST_PROTOBUF_VERSION, MESSAGES

Event: TypeAlias = (
    events.BookMark
    | events.BatchStart
    | events.L2Block
    | events.Transaction
    | events.BatchEnd
    | events.UpdateGER
    | events.L2BlockEnd
    | fixed.StartL2Block
    | fixed.L2Tx
    | fixed.EndL2Block
    | fixed.FixedUpdateGER
)

# Codecs of streams of version 2 and later, by entry type.
CODECS: Final[dict[int, MessageCodec[Any]]] = {
    number: MessageCodec(message) for number, message in MESSAGES.items()
}
_TYPES: Final[dict[type, int]] = {
    codec.cls: number for codecs in (CODECS, fixed.CODECS) for number, codec in codecs.items()
}


def event_name(event: Event) -> str:
    """The name of the event's kind, the same in all versions."""
    return "UpdateGER" if isinstance(event, fixed.FixedUpdateGER) else type(event).__name__


def _codec(type: int, version: int) -> MessageCodec[Any] | fixed.FixedCodec | None:
    return (CODECS if version >= FIRST_PROTOBUF_VERSION else fixed.CODECS).get(type)


def kind_of(type: int, version: int) -> str | None:
    """The name of the event with this entry type in streams of this version; None if there is
    none."""
    codec = _codec(type, version)
    return codec.name if codec is not None else None


def decode(entry: Entry, *, version: int) -> Event:
    """Decode an entry of a stream of this version (`Header.version`).

    Raises `DecodeFailed`, which names the entry, if its type is unknown or its data invalid.
    """
    return decode_data(entry.type, entry.data, version=version, number=entry.number)


def decode_data(type: int, data: bytes, *, version: int, number: int | None = None) -> Event:
    """Decode data without its entry; `number` is for the message of `DecodeFailed`."""
    codec = _codec(type, version)
    if codec is None:
        raise DecodeFailed(number, f"streams of version {version} have no event of type {type}")
    try:
        event: Event = codec.read(data)
        return event
    except ValueError as error:
        raise DecodeFailed(number, f"invalid {codec.name}: {error}") from None


def decode_batch(batch: EntryBatch, *, version: int) -> Iterator[tuple[int, Event]]:
    """Number and event of each entry of a batch. Raises `DecodeFailed` at the first bad one."""
    for entry in batch:
        yield entry.number, decode(entry, version=version)


def encode(event: Event, *, version: int) -> tuple[int, bytes]:
    """Encode an event as entry type and data for a stream of this version.

    The data of a `BookMark` is the bookmark's key. Raises `BadEvent` if the version has no such
    event or a value does not fit its field.
    """
    cls = type(event)
    number = _TYPES.get(cls, -1)
    codec = _codec(number, version)
    if codec is None or codec.cls is not cls:
        raise BadEvent(f"streams of version {version} have no {cls.__module__}.{cls.__name__}")
    try:
        return number, codec.write(event)
    except ValueError as error:
        raise BadEvent(str(error)) from None


def as_json(event: Event) -> dict[str, Any]:
    """The event's fields for JSON: bytes as 0x..., enumerations by name where they have one;
    `unknown` only if there are any."""
    found = {name: _plain(value) for name, value in zip(event._fields, event, strict=True)}
    if found.get("unknown") == "0x":
        del found["unknown"]
    return found


def _plain(value: Any) -> Any:
    if isinstance(value, bytes):
        return f"0x{value.hex()}"
    if isinstance(value, events.BatchType | events.BookmarkType):
        return value.name
    return value
