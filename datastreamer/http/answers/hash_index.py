"""`FILE.explorer`, a folder with a database: which entries have a hash or an address.

Owns the database, its making and its removal when it is damaged. It is derived from the stream, and
nothing depends on it: who finds an entry here compares it with what was looked for.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
import stat
import struct
import threading
from collections.abc import Callable
from typing import Final, NamedTuple, TypeVar

from datastreamer._codec import EntryBatch
from datastreamer.errors import DecodeFailed, UntrustedFile
from datastreamer.zkevm import events, fixed
from datastreamer.zkevm.block_json import is_transaction
from datastreamer.zkevm.decoding import Event, decode_data, kind_of

SUFFIX: Final = ".explorer"
PAIR: Final = struct.Struct(">qQ")
_NAME: Final = "hashes.sqlite"
# Two processes may make the index at the same time: the later one waits this long to open it.
_OPEN_SECONDS: Final = 30.0
_KINDS: Final = frozenset({"L2Block", "EndL2Block", "Transaction", "L2Tx"})
# Primary result codes of SQLite: its own sign of a table that is missing, of damage, and of another
# kind of file.
_DAMAGED: Final = frozenset({sqlite3.SQLITE_ERROR, sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB})
_BUSY: Final = frozenset({sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED})
_SCHEMA: Final = """
CREATE TABLE IF NOT EXISTS state (
    version INTEGER PRIMARY KEY CHECK (version = 1), stream BLOB NOT NULL, epoch INTEGER NOT NULL,
    next INTEGER NOT NULL
);
CREATE TABLE IF NOT EXISTS found (
    key INTEGER, entry INTEGER, PRIMARY KEY (key, entry)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS unread (first INTEGER PRIMARY KEY, stop INTEGER NOT NULL);
"""

T = TypeVar("T")


class IndexState(NamedTuple):
    """The index has the entries below `next` that could be read, as they were at `epoch` of the
    stream."""

    stream: bytes
    epoch: int
    next: int


def key_of(value: bytes) -> int:
    """Under which key a hash or an address is found; others may have the same."""
    return int.from_bytes(value[-8:], "big", signed=True)


def names_of(event: Event) -> set[bytes]:
    """The hashes and addresses that lead to an event. Raises `DecodeFailed` and `ExtraMissing`."""
    if isinstance(event, events.L2Block | fixed.EndL2Block):
        return {event.hash} if event.hash else set()
    if is_transaction(event):
        opened = event.open()
        found = {opened.hash, opened.sender, opened.to, opened.contract}
        return {each for each in found if each}
    return set()


def pairs_of(version: int, batch: EntryBatch) -> bytes:
    """The keys of a batch and their entries, packed. Raises `ExtraMissing`."""
    parts = []
    for at, kind in enumerate(batch.types):
        if kind_of(kind, version) in _KINDS:
            with contextlib.suppress(DecodeFailed):
                event = decode_data(kind, bytes(batch.data(at)), version=version)
                entry = batch.first_number + at
                parts += [PAIR.pack(key_of(name), entry) for name in names_of(event)]
    return b"".join(parts)


class HashIndex:
    """The index beside the stream at `path`. Methods may wait for the disk; they raise
    `sqlite3.Error`, but after damage the index is made anew, and empty."""

    def __init__(self, path: str) -> None:
        """Raises `OSError`, and `UntrustedFile` for a folder that others can change."""
        self._folder = path + SUFFIX
        with contextlib.suppress(FileExistsError):
            os.mkdir(self._folder, 0o700)
        found = os.lstat(self._folder)
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o077:
            raise UntrustedFile(
                self._folder,
                "not a folder of this process's user that no other may enter; remove it, and the "
                "index of hashes is made anew",
            )
        self._lock = threading.RLock()
        self._database: sqlite3.Connection | None = None
        with self._lock:
            self._run(lambda database: None)

    def close(self) -> None:
        with self._lock:
            if self._database is not None:
                self._database.close()
                self._database = None

    def _open(self) -> sqlite3.Connection:
        database = sqlite3.connect(
            os.path.join(self._folder, _NAME), timeout=_OPEN_SECONDS, check_same_thread=False
        )
        self._database = database
        database.isolation_level = None
        database.execute("PRAGMA journal_mode = WAL")
        # The newest commits may be lost with the power, and the index remains whole.
        database.execute("PRAGMA synchronous = NORMAL")
        if database.execute("PRAGMA quick_check(1)").fetchone() != ("ok",):
            raise sqlite3.DatabaseError("quick_check found damage")
        database.executescript(_SCHEMA)
        # A process that cannot change it now tries again later.
        database.execute("PRAGMA busy_timeout = 0")
        return database

    def _run(self, work: Callable[[sqlite3.Connection], T]) -> T:
        """`work` with the database; after damage with a new one."""
        with self._lock:
            try:
                return work(self._database or self._open())
            except sqlite3.DatabaseError as error:
                code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_CORRUPT) & 0xFF
                if code not in _DAMAGED:
                    raise
                self.close()
                for name in os.listdir(self._folder):
                    os.unlink(os.path.join(self._folder, name))
                return work(self._open())

    def state(self) -> IndexState | None:
        """What the index covers; None if it is new."""

        def read(database: sqlite3.Connection) -> IndexState | None:
            row = database.execute("SELECT stream, epoch, next FROM state").fetchone()
            return None if row is None else IndexState(*row)

        return self._run(read)

    def find(self, key: int, before: int, limit: int) -> list[int]:
        """The newest entries below `before` under a key."""
        query = "SELECT entry FROM found WHERE key = ? AND entry < ? ORDER BY entry DESC LIMIT ?"
        return self._run(
            lambda database: [row[0] for row in database.execute(query, (key, before, limit))]
        )

    def begin(self) -> bool:
        """Begin to change it; False while another process does."""
        try:
            self._run(lambda database: database.execute("BEGIN IMMEDIATE"))
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode & 0xFF in _BUSY:
                return False
            raise
        return True

    def add(self, pairs: bytes | None, first: int, end: int, stop: int) -> None:
        """Add the keys of the entries from `first` up to before `end`; None: these cannot be read.
        Those from there up to before `stop` could not be read earlier."""

        def write(database: sqlite3.Connection) -> None:
            database.execute("DELETE FROM unread WHERE first = ?", (first,))
            gaps = [(first, end)] * (pairs is None) + [(end, stop)] * (end < stop)
            database.executemany("INSERT INTO unread VALUES (?, ?)", gaps)
            rows = PAIR.iter_unpack(pairs or b"")
            database.executemany("INSERT OR IGNORE INTO found VALUES (?, ?)", rows)

        self._run(write)

    def unread(self) -> list[tuple[int, int]]:
        """The ranges of entries that could not be read: the first one, and the one after the
        last."""
        query = "SELECT first, stop FROM unread ORDER BY first"
        return self._run(lambda database: database.execute(query).fetchall())

    def cut(self, start: int) -> None:
        """Forget the entries from `start` on."""

        def write(database: sqlite3.Connection) -> None:
            database.execute("DELETE FROM found WHERE entry >= ?", (start,))
            database.execute("DELETE FROM unread WHERE first >= ?", (start,))
            database.execute("UPDATE unread SET stop = ? WHERE stop > ?", (start, start))

        self._run(write)

    def commit(self, state: IndexState) -> None:
        def write(database: sqlite3.Connection) -> None:
            if not database.in_transaction:
                raise sqlite3.DatabaseError("it was damaged, and is made anew")
            database.execute("INSERT OR REPLACE INTO state VALUES (1, ?, ?, ?)", state)
            database.execute("COMMIT")

        self._run(write)

    def roll_back(self) -> None:
        """Forget what was changed since `begin`."""

        def undo(database: sqlite3.Connection) -> None:
            if database.in_transaction:
                database.execute("ROLLBACK")

        self._run(undo)
