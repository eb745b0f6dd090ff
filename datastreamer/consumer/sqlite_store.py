"""A reassembly's progress in SQLite: alone, or in the transaction that holds the results.

Owns the tables. A payload costs a few rows, however many are known.
"""

from __future__ import annotations

import contextlib
import json
import os
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from datastreamer.errors import CursorFailed, UntrustedFile
from datastreamer.position import Position
from datastreamer.reassembly.orderer import Block
from datastreamer.reassembly.progress import ReassemblyProgress, SourceProgress
from datastreamer.storage.disk.access import Access, create_file, open_file

_PREFIX: Final = 33
_MOST: Final = 2**63 - 1
"""SQLite's integers have 64 bits, one of them the sign."""

_SIDES: Final = ("-journal", "-wal", "-shm")

_TABLES: Final = (
    "reassembly_place (source TEXT PRIMARY KEY, position INTEGER, seen INTEGER, read TEXT)",
    "reassembly_known (number INTEGER PRIMARY KEY AUTOINCREMENT, id BLOB, prefixes BLOB)",
    (
        "reassembly_chain (number INTEGER PRIMARY KEY, hash BLOB, parent BLOB, weight TEXT, "
        "id BLOB, prefixes BLOB)"
    ),
    "reassembly_saves (one INTEGER PRIMARY KEY, count INTEGER)",
    "reassembly_subscription (one INTEGER PRIMARY KEY, prefixes TEXT)",
)


class SqliteStore:
    """SqliteStore(path) keeps a reassembly's progress in a database of its own;
    SqliteStore(connection) in the caller's, whose transaction each save commits: write the results
    there first, and the database holds both or neither.

    Make a connection of your own with ``check_same_thread=False`` for `reassemble`, which
    saves in a thread. `load` and `save` raise `CursorFailed`; so does a save after another
    consumer's: of two consumers with one store one ends, and nothing that it did since its
    last save is committed. A save that fails rolls back.
    """

    def __init__(self, database: str | os.PathLike[str] | sqlite3.Connection) -> None:
        self._own = not isinstance(database, sqlite3.Connection)
        # The number of saves in the database, as of the last load or save here.
        self._saves: int | None = None
        # The subscription in the database, likewise.
        self._subscribed: tuple[bytes, ...] | None = None
        self._name = "the database"
        try:
            if isinstance(database, sqlite3.Connection):
                self._database = database
            else:
                self._name = os.fspath(database)
                _make_private(self._name)
                self._database = sqlite3.connect(database, check_same_thread=False)
                self._database.execute("PRAGMA journal_mode=WAL")
            for table in _TABLES:
                self._database.execute(f"CREATE TABLE IF NOT EXISTS {table}")
        except (sqlite3.Error, OSError) as error:
            raise self._failed("cannot be opened", error) from error

    def close(self) -> None:
        """Close a database of its own. A caller's connection stays open."""
        if self._own:
            self._database.close()

    def __enter__(self) -> SqliteStore:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def load(self) -> ReassemblyProgress | None:
        """Everything that was saved; None before the first save."""
        ask = self._database.execute
        try:
            # First: a save by another consumer from here on is noticed by the next save.
            self._saves = self._saves_there()
            places = {
                source: SourceProgress(
                    _unsigned(position), _unsigned(seen), Position.from_json(read)
                )
                for source, position, seen, read in ask("SELECT * FROM reassembly_place")
            }
            known = [
                (own, _prefixes(each))
                for own, each in ask("SELECT id, prefixes FROM reassembly_known ORDER BY number")
            ]
            chain = [
                (
                    Block(number, own, parent, None if weight is None else int(weight)),
                    (payload, _prefixes(each)),
                )
                for number, own, parent, weight, payload, each in ask(
                    "SELECT * FROM reassembly_chain ORDER BY number"
                )
            ]
            row = ask("SELECT prefixes FROM reassembly_subscription").fetchone()
        except sqlite3.Error as error:
            raise self._failed("cannot be read", error) from error
        self._subscribed = None if row is None else tuple(map(bytes.fromhex, json.loads(row[0])))
        if not (places or known or chain):
            return None
        return ReassemblyProgress(places, known, len(known), chain, subscribed=self._subscribed)

    def save(self, progress: ReassemblyProgress) -> None:
        """Save `progress`, and commit the transaction that is open."""
        database = self._database
        try:
            with self._transaction():
                saves = self._count_save()
                subscribed = progress.subscribed
                if subscribed is not None and subscribed != self._subscribed:
                    database.execute(
                        "REPLACE INTO reassembly_subscription VALUES (0, ?)",
                        (json.dumps([prefix.hex() for prefix in subscribed]),),
                    )
                database.executemany(
                    "REPLACE INTO reassembly_place VALUES (?, ?, ?, ?)",
                    [
                        (name, _signed(place.position), _signed(place.seen), place.read.to_json())
                        for name, place in progress.places.items()
                    ],
                )
                if progress.known:
                    database.executemany(
                        "INSERT INTO reassembly_known (id, prefixes) VALUES (?, ?)",
                        [(own, b"".join(prefixes)) for own, prefixes in progress.known],
                    )
                    database.execute(
                        "DELETE FROM reassembly_known WHERE number <= "
                        "(SELECT MAX(number) FROM reassembly_known) - ?",
                        (progress.known_count,),
                    )
                if progress.chain:
                    self._check_numbers(progress)
                    database.execute(
                        "DELETE FROM reassembly_chain WHERE number >= ? OR number < ?",
                        (progress.chain[0][0].number, progress.chain_floor),
                    )
                    database.executemany(
                        "INSERT INTO reassembly_chain VALUES (?, ?, ?, ?, ?, ?)",
                        [
                            (
                                block.number,
                                block.hash,
                                block.parent,
                                None if block.weight is None else str(block.weight),
                                own,
                                b"".join(prefixes),
                            )
                            for block, (own, prefixes) in progress.chain
                        ],
                    )
        except sqlite3.Error as error:
            raise self._failed("cannot be written", error) from error
        self._saves, self._subscribed = saves, subscribed

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        """The caller's transaction, or a new one; committed at the end, or rolled back."""
        database = self._database
        try:
            if not database.in_transaction:
                database.execute("BEGIN")
            yield
            self._end("COMMIT")
        except BaseException:
            if database.in_transaction:
                self._end("ROLLBACK")
            raise

    def _end(self, how: str) -> None:
        database = self._database
        # From Python 3.12 on there are connections whose `commit` does nothing.
        if getattr(database, "autocommit", None) is True:
            database.execute(how)
        elif how == "COMMIT":
            database.commit()
        else:
            database.rollback()

    def _saves_there(self) -> int:
        row = self._database.execute("SELECT count FROM reassembly_saves").fetchone()
        return 0 if row is None else int(row[0])

    def _count_save(self) -> int:
        """The number of saves, with this one. Raises `CursorFailed` if another consumer has saved
        since the last load or save here."""
        count = self._saves_there() if self._saves is None else self._saves
        changed = self._database.execute(
            "UPDATE reassembly_saves SET count = ? WHERE count = ?", (count + 1, count)
        ).rowcount
        if not count and not changed:
            changed = self._database.execute(
                "INSERT OR IGNORE INTO reassembly_saves VALUES (0, 1)"
            ).rowcount
        if not changed:
            raise CursorFailed(
                self._name,
                "another consumer has saved the progress of a reassembly here since this one did; "
                "each needs a store of its own",
            )
        return count + 1

    def _check_numbers(self, progress: ReassemblyProgress) -> None:
        """The chain is stored by number, in order, so numbers above 2**63 - 1 cannot be mapped to
        negative ones."""
        for block, _ in progress.chain:
            if not 0 <= block.number <= _MOST:
                raise CursorFailed(
                    self._name,
                    f"the progress of a reassembly cannot be written: block {block.number} is not "
                    f"in 0 to {_MOST}, which is what SQLite's integers hold; number blocks so",
                )

    def _failed(self, what: str, error: Exception) -> CursorFailed:
        return CursorFailed(self._name, f"the progress of a reassembly {what}: {error}")


def _make_private(path: str) -> None:
    """Make the database its owner's alone if it is new: SQLite gives its other files the same
    permissions. Raises `CursorFailed` if one of them is a link or another user's."""
    if not path or path == ":memory:":
        return
    for name in (path, *(path + suffix for suffix in _SIDES)):
        try:
            os.close(open_file(name, Access.private(path), write=False))
        except FileNotFoundError:
            continue
        except UntrustedFile as error:
            raise CursorFailed(error.path, f"{error.what}; remove it to begin anew") from None
    with contextlib.suppress(FileExistsError):
        os.close(create_file(path, Access.private()))


def _signed(number: int) -> int:
    """A u64 as SQLite holds it: those from 2**63 on are below 0."""
    return number if number <= _MOST else number - (1 << 64)


def _unsigned(kept: int) -> int:
    return kept if kept >= 0 else kept + (1 << 64)


def _prefixes(packed: bytes) -> tuple[bytes, ...]:
    return tuple(packed[at : at + _PREFIX] for at in range(0, len(packed), _PREFIX))
