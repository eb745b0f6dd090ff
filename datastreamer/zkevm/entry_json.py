"""An entry as JSON values, with or without its meaning in a zkEVM stream."""

from __future__ import annotations

from typing import Any

from datastreamer._codec import Entry
from datastreamer.errors import DecodeFailed
from datastreamer.zkevm.decoding import as_json, decode, kind_of


def entry_json(entry: Entry) -> dict[str, Any]:
    """An entry, not decoded."""
    data = entry.data
    return {
        "number": entry.number,
        "type": entry.type,
        "length": len(data),
        "data": f"0x{data.hex()}",
    }


def meaning_json(entry: Entry, version: int) -> dict[str, Any]:
    """The kind and the fields of an entry; both None if its type is not that of an event. If it
    cannot be decoded, `error` is the reason and `fields` is None."""
    kind = kind_of(entry.type, version)
    if kind is None:
        return {"kind": None, "fields": None}
    try:
        return {"kind": kind, "fields": as_json(decode(entry, version=version))}
    except DecodeFailed as error:
        return {"kind": kind, "fields": None, "error": error.reason}
