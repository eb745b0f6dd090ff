"""Streams that change while they are ingested, and what their tables have to hold.

The oracle decodes every entry by itself; the tables are read by DuckDB, by the manifest alone.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import coincurve
import duckdb
import rlp
import sha3

from datastreamer import DataStream, zkevm

START = 1_700_000_000
KEY = coincurve.PrivateKey.from_int(7)

Rows = dict[str, list[tuple[Any, ...]]]


def signed(nonce: int) -> bytes:
    """A transaction that this number identifies."""
    fields: list[Any] = [nonce, 1, 21_000, b"t" * 20, 0, b""]
    signature = KEY.sign_recoverable(sha3.keccak_256(rlp.encode(fields)).digest(), hasher=None)
    r, s = (int.from_bytes(signature[at : at + 32], "big") for at in (0, 32))
    return bytes(rlp.encode([*fields, 27 + signature[64], r, s]))


SIGNED = [signed(nonce) for nonce in range(1_000, 1_040)]


class World:
    """A stream, and all that it has ever been."""

    def __init__(self, stream: DataStream, seed: int, keep: int) -> None:
        self.stream = stream
        self.choose = random.Random(seed)
        self.keep = keep
        """As many entries at the beginning never change."""

        self.number = 0
        self.histories: list[list[Any]] = []
        self.append(keep // 4 + 2)

    def append(self, blocks: int) -> None:
        """Blocks with up to two transactions, some with a number that was there before."""
        for _ in range(blocks):
            if self.number > 2 and self.choose.random() < 0.15:
                self.number -= self.choose.randint(1, 2)
            time = START + self.choose.randint(0, 3 * 86_400)
            block = zkevm.L2Block(self.number, self.number // 3, time)
            events: list[Any] = [block]
            events += [
                zkevm.Transaction(self.number, at, encoded=self.choose.choice(SIGNED))
                for at in range(self.choose.randint(0, 2))
            ]
            if self.choose.random() < 0.3:
                events.append(zkevm.BatchEnd(self.number // 3))
            if self.choose.random() < 0.3:
                events.insert(0, zkevm.BatchStart(self.number // 3))
            with self.stream.atomic_op() as op:
                mark = zkevm.BookMark(zkevm.BookmarkType.L2_BLOCK, self.number)
                op.add_bookmark(zkevm.encode(mark, version=3)[1])
                for event in events:
                    op.add_entry(*zkevm.encode(event, version=3))
            self.number += 1
        self.note()

    def change(self) -> None:
        """Truncate or update, and perhaps append."""
        total = self.stream.total_entries
        if self.choose.random() < 0.7 and total > self.keep:
            self.stream.truncate(self.choose.randint(self.keep, total - 1))
        else:
            blocks = [
                (number, event)
                for number, event in enumerate(self.events())
                if isinstance(event, zkevm.L2Block) and number >= self.keep
            ]
            if blocks:
                number, event = self.choose.choice(blocks)
                time = START + self.choose.randint(0, 3 * 86_400)
                data = zkevm.encode(event._replace(timestamp=time), version=3)
                self.stream.update_entry(number, *data)
        self.note()
        if self.choose.random() < 0.7:
            self.append(self.choose.randint(1, 4))

    def events(self) -> list[Any]:
        return [zkevm.decode(entry, version=3) for entry in self.stream.entries()]

    def note(self) -> None:
        self.histories.append(self.events())

    def is_a_prefix(self, rows: Rows, done: int) -> bool:
        """Whether the tables are what the stream has been at some time, up to an entry."""
        return any(
            len(each) >= done and expected(each[:done]) == rows for each in self.histories[::-1]
        )


def expected(events: list[Any]) -> Rows:
    """The rows of all tables."""
    rows: Rows = {name: [] for name in ("blocks", "transactions", "batches", "batch_ends")}
    blocks: dict[int, tuple[int, int]] = {}
    for number, event in enumerate(events):
        if isinstance(event, zkevm.L2Block):
            blocks[event.number] = number, event.timestamp
            rows["blocks"].append((number, event.number, event.timestamp, day(event.timestamp)))
        elif isinstance(event, zkevm.Transaction):
            of, time = blocks.get(event.l2block_number, (None, None))
            nonce = SIGNED.index(event.encoded) + 1_000
            own = (number, event.l2block_number, event.index, nonce, of, time)
            rows["transactions"].append((*own, None if time is None else day(time)))
        elif isinstance(event, zkevm.BatchStart):
            rows["batches"].append((number, event.number))
        elif isinstance(event, zkevm.BatchEnd):
            rows["batch_ends"].append((number, event.number))
    return rows


def day(time: int) -> int:
    return time // 86_400


QUERIES = {
    "blocks": "entry_number, number, timestamp, date_diff('day', date '1970-01-01', day::date)",
    "transactions": "entry_number, l2block_number, index, nonce, block_entry, timestamp, "
    "date_diff('day', date '1970-01-01', day::date)",
    "batches": "entry_number, number",
    "batch_ends": "entry_number, number",
}


def manifest_of(out: Path) -> dict[str, Any]:
    """The newest manifest."""
    path = max((out / "_manifest").glob("*.json"))
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def rows_of(out: Path, manifest: dict[str, Any]) -> Rows:
    """The rows that the manifest names, in the order of entries."""
    names = [each["name"] for each in manifest["ranges"]]
    found: Rows = {}
    for table, columns in QUERIES.items():
        paths = sorted(map(str, paths_of(out / table, names)))
        found[table] = []
        if paths:
            rows = duckdb.sql(f"""
                select {columns} from read_parquet({paths}, hive_partitioning = true)
                order by entry_number
            """)
            found[table] = rows.fetchall()
    return found


def paths_of(table: Path, names: list[str]) -> Iterator[Path]:
    for name in names:
        yield from table.glob(f"**/range={name}/*.parquet")
