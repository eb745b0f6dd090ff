"""The forms of entries, and which one a client asks for.

Owns the choice by `Accept` and `format`, and compression by `Accept-Encoding`. Each form has a
beginning, pieces that do not depend on each other, a separator and an end. Knows no stream.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from functools import partial
from typing import Final, NamedTuple, Protocol

from datastreamer._codec import EntryBatch
from datastreamer._lazy import zstd
from datastreamer.errors import ExtraMissing
from datastreamer.http.port.messages import JSON, HttpProblem, HttpRequest
from datastreamer.selection.times import AskTimes
from datastreamer.zkevm.entry_json import KnownTimes, timed_lines

NDJSON: Final = "application/x-ndjson"
OCTETS: Final = "application/octet-stream"
ARROW: Final = "application/vnd.apache.arrow.stream"
# The name of each for `format`; the first is the default.
NAMES: Final = {"ndjson": NDJSON, "json": JSON, "arrow": ARROW, "raw": OCTETS}


class EntryForm(NamedTuple):
    """One form: `kind` is its media type."""

    kind: str
    begin: bytes
    piece: Callable[[EntryBatch], bytes]
    separator: bytes
    end: bytes


def name_of(kind: str) -> str:
    """The name of a media type for `format`."""
    return next(name for name, each in NAMES.items() if each == kind)


def json_items(batch: EntryBatch, times: KnownTimes) -> bytes:
    """The entries as items of a JSON array, in one line."""
    return timed_lines(batch, times)[:-1].replace(b"\n", b", ")


def _array_lines(batch: EntryBatch, times: KnownTimes) -> bytes:
    return timed_lines(batch, times)[:-1].replace(b"\n", b",\n")


def chosen_kind(request: HttpRequest, name: str | None) -> str:
    """The media type that a client asks for: `name` is the parameter `format`. Raises
    `HttpProblem`."""
    if name is not None:
        return NAMES[name]
    accepted = request.header(b"accept")
    if not accepted:
        return NDJSON
    wanted = _qualities(accepted)

    def quality(kind: str) -> float:
        for each in (kind, "application/*", "*/*"):
            if each in wanted:
                return wanted[each]
        return 0.0

    best = max(NAMES.values(), key=quality)
    if not quality(best):
        raise HttpProblem(406, f"no such format; there are {', '.join(NAMES.values())}")
    return best


def form_of(kind: str, time_marks: AskTimes) -> EntryForm:
    """The form with this media type; JSON has times. May import a large package. Raises
    `HttpProblem`."""
    if kind == NDJSON:
        return EntryForm(kind, b"", partial(timed_lines, times=KnownTimes(time_marks)), b"", b"")
    if kind == JSON:
        return EntryForm(
            kind, b"[", partial(_array_lines, times=KnownTimes(time_marks)), b",\n", b"]\n"
        )
    try:
        from datastreamer.arrow import ipc
    except ExtraMissing:
        raise HttpProblem(
            406, "Arrow needs pyarrow, which the server does not have; ask for another format"
        ) from None
    entries = ipc.IpcEntries()
    return EntryForm(kind, entries.begin, entries.piece, b"", ipc.END)


# Compression.


class Compressor(Protocol):
    def compress(self, data: bytes, /) -> bytes: ...

    def flush(self) -> bytes: ...


def chosen_encoding(request: HttpRequest) -> str | None:
    """The content coding for JSON: zstd if it is accepted and known here, gzip if it is accepted,
    or None."""
    wanted = _qualities(request.header(b"accept-encoding") or "")
    known = ["gzip"] if zstd() is None else ["zstd", "gzip"]
    return next((each for each in known if wanted.get(each)), None)


def compressor_of(encoding: str) -> Compressor:
    """A compressor that favours speed."""
    if encoding == "gzip":
        return zlib.compressobj(1, zlib.DEFLATED, 31)
    found: Compressor = zstd().ZstdCompressor()
    return found


def _qualities(header: str) -> dict[str, float]:
    """The weights of a header's values."""
    found = {}
    for each in header.split(","):
        name, *parameters = (part.strip() for part in each.split(";"))
        quality = 1.0
        for parameter in parameters:
            if parameter.lower().startswith("q="):
                try:
                    quality = float(parameter[2:])
                except ValueError:
                    quality = 0.0
        found[name.lower()] = quality
    return found
