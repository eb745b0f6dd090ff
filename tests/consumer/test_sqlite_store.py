"""Progress in SQLite: together with the results or not at all, and of one consumer at a time."""

from __future__ import annotations

import sqlite3
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from datastreamer.consumer.blocking_reassembly import BlockingReassembly
from datastreamer.consumer.sqlite_store import SqliteStore
from datastreamer.errors import CursorFailed
from datastreamer.position import Position
from datastreamer.reassembly import Block, Splitter, pack_message
from datastreamer.reassembly.progress import ReassemblyProgress, SourceProgress
from datastreamer.storage.stream import DataStream

CONNECTIONS: list[dict[str, Any]] = [{}, {"isolation_level": None}]
if sys.version_info >= (3, 12):
    CONNECTIONS += [{"autocommit": True}, {"autocommit": False}]


def own(number: int) -> bytes:
    return b"%032d" % number


def progress(number: int) -> ReassemblyProgress:
    name = (own(number), (b"\x01" + own(number),))
    return ReassemblyProgress(
        {"a": SourceProgress(number, number, Position(number))}, [name], number + 1
    )


@pytest.fixture
def stream(tmp_path: Path) -> Path:
    path = tmp_path / "s.bin"
    with DataStream.create(path, sync="os", index="memory") as made:
        for number in range(20):
            messages = Splitter().split(own(number), {b"\x01" + own(number): b"part"})
            with made.atomic_op() as op:
                op.add_entries(0x10, [pack_message(*each) for each in messages])
    return path


@pytest.mark.parametrize("how", CONNECTIONS, ids=str)
def test_all_of_it_or_nothing(tmp_path: Path, how: dict[str, Any]) -> None:
    path = tmp_path / "db"
    with closing(sqlite3.connect(path, **how)) as database:
        database.execute("CREATE TABLE result (id INTEGER)")
        if how.get("autocommit") is False:
            database.commit()
        store = SqliteStore(database)
        assert store.load() is None
        for number in range(3):
            if not database.in_transaction:
                database.execute("BEGIN")
            database.execute("INSERT INTO result VALUES (?)", (number,))
            store.save(progress(number))
        # A crash in the middle of a save, as far as the file is concerned.
        database.execute(
            "CREATE TRIGGER full BEFORE INSERT ON reassembly_known BEGIN "
            "SELECT RAISE(ABORT, 'the disk is full'); END"
        )
        if how.get("autocommit") is False:
            database.commit()
        if not database.in_transaction:
            database.execute("BEGIN")
        database.execute("INSERT INTO result VALUES (3)")
        with pytest.raises(CursorFailed, match="cannot be written: the disk is full"):
            store.save(progress(3))
        # Without a transaction of the caller's it makes one.
        with pytest.raises(CursorFailed, match="the disk is full"):
            store.save(progress(3))
    with closing(sqlite3.connect(path)) as database:
        assert database.execute("SELECT id FROM result").fetchall() == [(0,), (1,), (2,)]
        found = SqliteStore(database).load()
    assert found is not None
    assert found.places["a"].position == 2
    assert [int(name) for name, _ in found.known] == [0, 1, 2]


@pytest.mark.parametrize("position", [2**63 - 1, 2**63, 2**64 - 3])
def test_positions_of_all_64_bits(tmp_path: Path, position: int) -> None:
    place = SourceProgress(position, position + 1, Position(position))
    with SqliteStore(tmp_path / "db") as store:
        store.save(ReassemblyProgress({"a": place}))
    with SqliteStore(tmp_path / "db") as store:
        found = store.load()
    assert found is not None
    assert found.places == {"a": place}


@pytest.mark.parametrize("how", CONNECTIONS, ids=str)
@pytest.mark.parametrize("number", [2**63, 2**64, -1])
def test_a_block_whose_number_it_cannot_hold(
    tmp_path: Path, number: int, how: dict[str, Any]
) -> None:
    """It is named, and nothing of that save is there, the results included."""

    def chain(number: int) -> ReassemblyProgress:
        block = Block(number, b"h", b"p", 2**80)
        return ReassemblyProgress(
            {"a": SourceProgress(7, 7, Position(7))}, chain=[(block, (own(1), ()))]
        )

    path = tmp_path / "db"
    with closing(sqlite3.connect(path, **how)) as database:
        database.execute("CREATE TABLE result (id INTEGER)")
        store = SqliteStore(database)
        store.save(chain(2**63 - 1))
        if not database.in_transaction:
            database.execute("BEGIN")
        database.execute("INSERT INTO result VALUES (1)")
        with pytest.raises(CursorFailed, match=f"block {number} is not in 0 to"):
            store.save(chain(number))
        # It continues with what it can hold.
        store.save(ReassemblyProgress({"a": SourceProgress(8, 8, Position(8))}))
    with closing(sqlite3.connect(path)) as database:
        assert database.execute("SELECT id FROM result").fetchall() == []
        found = SqliteStore(database).load()
    assert found is not None
    assert found.places["a"].position == 8
    assert [block for block, _ in found.chain] == [Block(2**63 - 1, b"h", b"p", 2**80)]


def test_opening_it_ends_no_transaction(tmp_path: Path) -> None:
    with closing(sqlite3.connect(tmp_path / "db")) as database:
        database.execute("CREATE TABLE result (id INTEGER)")
        database.execute("INSERT INTO result VALUES (1)")
        SqliteStore(database).load()
        assert database.in_transaction
        database.rollback()
        assert database.execute("SELECT * FROM result").fetchall() == []


def test_of_two_consumers_with_one_store_one_ends(stream: Path, tmp_path: Path) -> None:
    """And what they committed together is each payload once."""

    def connected() -> sqlite3.Connection:
        made = sqlite3.connect(tmp_path / "db")
        made.execute("CREATE TABLE IF NOT EXISTS result (id INTEGER)")
        return made

    with closing(connected()) as first, closing(connected()) as second:
        consumers = [
            BlockingReassembly([stream], store=SqliteStore(each)) for each in (first, second)
        ]

        def result(database: sqlite3.Connection, payload: Any) -> None:
            database.execute("INSERT INTO result VALUES (?)", (int(payload.id),))

        result(first, next(consumers[0]))
        payload = next(consumers[0])  # The one before is saved with its result.
        result(second, next(consumers[1]))
        for _ in range(2):
            with pytest.raises(CursorFailed, match="another consumer has saved"):
                next(consumers[1])
        result(first, payload)
        for payload in consumers[0]:
            result(first, payload)
        for each in consumers:
            each.close()
        # The next one is welcome.
        with BlockingReassembly([stream], store=SqliteStore(second)) as third:
            assert list(third) == []
        rows = first.execute("SELECT id FROM result").fetchall()
    assert sorted(number for (number,) in rows) == list(range(20))
