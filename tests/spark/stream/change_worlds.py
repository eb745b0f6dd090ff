"""Random worlds of a stream that is appended to, truncated and updated while a query follows its
changes and is killed: ``python -m tests.spark.stream.change_worlds FIRST COUNT``.

The checkpoint is as Spark keeps it: an offset is logged before its batch is read, a commit after.
The oracle is the stream itself, entry by entry, without Spark, Arrow or the source.
"""

from __future__ import annotations

import json
import random
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from datastreamer import DataStream, StreamServer
from datastreamer.errors import HistoryChanged, StreamFileError
from datastreamer.spark.source import DatastreamSource
from datastreamer.spark.stream.reader import TailReader
from datastreamer.zkevm import Sequencer, decode_data
from tests.spark.stream.following import made_by

Row = dict[str, Any]
BOOKMARK = 0xB0


class Kill(Exception):
    """The driver ends here."""


class Stream:
    """What its writer does. `rows` is the oracle: by number, what a query of the table has."""

    def __init__(self, stream: DataStream, chance: random.Random, table: str) -> None:
        self.stream = stream
        self._chance = chance
        self.table = table
        self.changes = 0
        self._made = 0

    def act(self, *, updates: bool) -> None:
        """Append, truncate or update; mostly append."""
        total, chance = self.stream.total_entries, self._chance
        what = chance.random()
        if what < 0.5 or not total:
            self._append()
        elif what < 0.8 or not updates:
            near = chance.random() < 0.7
            self.stream.truncate(chance.randrange(max(0, total - 40) if near else 0, total))
            self.changes += 1
            if chance.random() < 0.7:
                self._append()
        else:
            self._update()

    def _append(self) -> None:
        self._made += 1
        chance, mark = self._chance, self._made
        if self.table != "entries":
            sequencer = Sequencer(self.stream)
            for _ in range(chance.randrange(1, 4)):
                resumed = sequencer.state.batch_open
                with sequencer.resume() if resumed else sequencer.batch() as batch:
                    for _ in range(chance.randrange(1, 4)):
                        with batch.block(timestamp=mark, hash=_hash(mark), state_root=b"s" * 32):
                            pass
            return
        with self.stream.atomic_op() as op:
            for _ in range(chance.choice((1, 2, 5, 30, 300))):
                size = chance.choice((8, 30, 200, 3000))
                if chance.random() < 0.02:
                    size = 200_000
                kind = chance.choice((1, 2, 2, 3, BOOKMARK))
                if kind == BOOKMARK:
                    op.add_bookmark(b"%016d" % mark)
                else:
                    op.add_entry(kind, b"%d" % mark + chance.randbytes(size))

    def _update(self) -> None:
        entry = self.stream.entry(self._chance.randrange(self.stream.total_entries))
        old = bytes(entry.data)
        if entry.type == BOOKMARK:
            return
        if self.table == "entries":
            new = self._chance.randbytes(len(old))
        else:
            self._made += 1
            new = old
            for mark in range(self._made):
                new = new.replace(_hash(mark), _hash(self._made))
            if new == old:
                return
        self.stream.update_entry(entry.number, entry.type, new)
        self.changes += 1

    def rows(self, first: int) -> dict[int, Any]:
        """The table: of each row from entry `first` on its values."""
        found: dict[int, Any] = {}
        for number in range(first, self.stream.total_entries):
            entry = self.stream.entry(number)
            data = bytes(entry.data)
            if self.table == "entries":
                found[number] = entry.type, data
            elif entry.type != BOOKMARK:
                event = decode_data(entry.type, data, version=self.stream.header.version)
                if type(event).__name__ == "L2Block":
                    found[number] = event.number, event.hash
        return found


def _hash(mark: int) -> bytes:
    return b"%032d" % mark


class Query:
    """A query of changes, as Spark runs it, whose sink is a table in memory."""

    def __init__(
        self, world: Stream, place: dict[str, str], chance: random.Random, **options: str
    ) -> None:
        self.world, self._chance = world, chance
        self._options = {**place, "changes": "true", "table": world.table, **options}
        self.commits = 0
        self.table: dict[int, Any] = {}
        self.rows = self.kills = self.deletes = 0
        self.updates = True
        # Entries that an offset claims, which a change made unreadable before they were read.
        self._claimed: set[int] = set()
        self.reader = self._start()
        self.offsets = [json.dumps(self.reader.initialOffset())]

    def _start(self) -> TailReader:
        source = DatastreamSource(self._options)
        reader = made_by(source)
        assert isinstance(reader, TailReader)
        return reader

    def restart(self) -> None:
        """Kill the driver, perhaps before the last commit reached the disk."""
        self.kills += 1
        self.reader.stop()
        self.reader = self._start()
        if self.commits and self.commits == len(self.offsets) - 1 and self._chance.random() < 0.3:
            self.commits -= 1

    def batch(self, happens: float) -> bool:
        """Run the next batch, or again the one that was not committed; False if nothing is new.
        With this chance the stream changes, or the driver is killed, at each of its steps."""
        replay = self.commits < len(self.offsets) - 1
        start = self.offsets[self.commits]
        if not replay:
            end = self.reader.latestOffset(json.loads(start), self.reader.getDefaultReadLimit())
            if json.dumps(end) == start:
                return False
            self.offsets.append(json.dumps(end))
        changes = self.world.changes
        self._between(happens)
        end = json.loads(self.offsets[self.commits + 1])
        found = list(self._read(json.loads(start), end, happens))
        self._apply(found, end, strict=not replay and self.world.changes == changes)
        self._between(happens)
        self.commits += 1
        return True

    def _read(self, start: Row, end: Row, happens: float) -> Iterator[Row]:
        parts = self.reader.partitions(start, end)
        self._between(happens)
        executor = self._start()
        for part in self._chance.sample(list(parts), len(parts)):
            for batch in executor.read(part):
                yield from batch.to_pylist()
                self._between(happens / 4)
            self._between(happens / 4)

    def _between(self, happens: float) -> None:
        if self._chance.random() < happens:
            self.world.act(updates=self.updates)
        if self._chance.random() < happens / 3:
            raise Kill

    def _apply(self, found: list[Row], end: Row, *, strict: bool) -> None:
        """Deletes, then inserts, by the entry's number."""
        deleted = [row["_entry"] for row in found if row["_change"] == "delete"]
        assert len(deleted) == len(set(deleted))
        inserted = [row for row in found if row["_change"] == "insert"]
        assert len(inserted) == len({row["_entry"] for row in inserted})
        assert len(found) == len(deleted) + len(inserted)
        for row in found:
            if row["_change"] == "delete":
                own = {value for name, value in row.items() if not name.startswith("_")}
                assert own == {None}
        if strict and self.world.table == "entries":
            assert set(deleted) <= self.table.keys() | self._claimed
        for number in deleted:
            self.table.pop(number, None)
            self._claimed.discard(number)
        if strict:
            # What is there already is not inserted again.
            assert not {row["_entry"] for row in inserted} & self.table.keys()
        for row in inserted:
            columns = ("type", "data") if self.world.table == "entries" else ("number", "hash")
            assert row["_entry"] == row["number" if columns[0] == "type" else "entry_number"]
            self.table[row["_entry"]] = tuple(row[name] for name in columns)
        if not strict:
            entries = range(end["delivered"]["first"], end["entry"])
            self._claimed |= {number for number in entries if number not in self.table}
        self.rows += len(inserted)
        self.deletes += len(deleted)

    def settle(self) -> None:
        """Run all batches, and compare the table with the stream."""
        while self.batch(0):
            pass
        first = json.loads(self.offsets[0])["delivered"]["first"]
        expected = self.world.rows(first)
        assert self.table.keys() == expected.keys()
        assert self.table == expected


def run(seed: int, folder: Path, how: str) -> Query:
    """One world. `how`: of a file, of a server, of one that reports no epochs (which is truncated,
    but not updated), or the table of blocks."""
    chance = random.Random(f"{how} {seed}")
    path, table = folder / f"{how}-{seed}.bin", "blocks" if how == "blocks" else "entries"
    # Each part and batch of a server costs several connections.
    served = how in ("server", "old")
    options = {"partitionBytes": chance.choice(("100k", "32m") if served else ("8k", "100k"))}
    if chance.random() < 0.5:
        options["maxEntriesPerTrigger"] = str(chance.choice((70, 400) if served else (7, 50, 400)))
    with ExitStack() as stack:
        if not served:
            stream = stack.enter_context(
                DataStream.create(path, version=3, system_id=7, sync="os", index="memory")
            )
            place = {"path": str(path)}
        else:
            server = stack.enter_context(
                StreamServer(
                    *(path,),
                    host="127.0.0.1",
                    port=0,
                    version=3,
                    system_id=7,
                    sync="os",
                    index="memory",
                    in_process=True,
                )
            )
            stream = server.stream
            place = {"server": f"127.0.0.1:{server.port}"}
            place["batchReads"] = "false" if how == "old" else "true"
        world = Stream(stream, chance, table)
        for _ in range(chance.randrange(5)):
            world.act(updates=True)
        if chance.random() < 0.3:
            options["startingOffset"] = str(chance.randrange(stream.total_entries + 1))
        query = Query(world, place, chance, **options)
        query.updates = how != "old"
        for _ in range(12):
            for _ in range(chance.choice((0, 1, 1, 2, 30 if chance.random() < 0.05 else 3))):
                world.act(updates=query.updates)
            try:
                query.batch(chance.choice((0, 0.2, 0.6)))
            except Kill:
                query.restart()
            except (HistoryChanged, StreamFileError):
                # Without epochs a change in the middle of a batch ends the query.
                if how != "old":
                    raise
                query.restart()
            if chance.random() < 0.2:
                query.settle()
        query.settle()
        query.reader.stop()
        return query


HOW = ("file", "server", "old", "blocks")


def main(first: int, count: int) -> None:
    for seed in range(first, first + count):
        with tempfile.TemporaryDirectory() as folder:
            for how in HOW:
                try:
                    query = run(seed, Path(folder), how)
                except BaseException:
                    print("world", seed, how, flush=True)
                    raise
                print(
                    f"world {seed} {how}: {len(query.offsets)} batches, {query.world.changes} "
                    f"changes, {query.kills} kills, {query.rows} inserts, {query.deletes} deletes",
                    flush=True,
                )


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
