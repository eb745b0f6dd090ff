"""Writes `FILE.pages` byte by byte: nothing of the package's own writer or reader of that file is
used, nor its decoder."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import xxhash

from tests.storage.summaries.oracle import expected


def sidecar(path: Path) -> Path:
    return path.with_name(f"{path.name}.pages")


def record(page: int, held: dict[str, Any], stream_id: bytes) -> bytes:
    """The record of a whole page that holds this."""
    numbers = held["first"], held["covered"], held["entries"], held["flags"]
    types = {} if held["types"] is None else held["types"]
    packed = held["digest"] + struct.pack(">QIII", *numbers)
    packed += struct.pack(">HHQ", 0xFFFF if held["types"] is None else len(types), 0, 1000)
    for pair in (*held["ranges"],):
        packed += struct.pack(">QQ", *pair)
    packed += b"".join(struct.pack(">II", *it) for it in sorted(types.items()))
    return signed(packed.ljust(1016, b"\0"), page, stream_id)


def signed(packed: bytes, page: int, stream_id: bytes) -> bytes:
    own = xxhash.xxh3_64_digest(packed[:1016] + page.to_bytes(8, "big") + stream_id)
    return packed[:1016] + own


def stream_id_of(path: Path) -> bytes:
    # As the sidecar of checksums has it.
    return path.with_name(f"{path.name}.sums").read_bytes()[24:40]


def write_summaries(path: Path) -> list[bytes]:
    """Write the sidecar of all whole pages of a stream; returns their records."""
    stream_id = stream_id_of(path)
    records = [record(page, held, stream_id) for page, held in enumerate(expected(path)[:-1])]
    put(path, records, stream_id)
    return records


def put(path: Path, records: list[bytes], stream_id: bytes) -> None:
    packed = b"DSpages_" + struct.pack(">II", 1, 0) + stream_id
    header = (packed + xxhash.xxh3_64_digest(packed)).ljust(512, b"\0")
    sidecar(path).unlink(missing_ok=True)
    sidecar(path).write_bytes(header + b"".join(records))
