"""Follow a stream into SQLite: each entry is there exactly once, whatever crashes when.

    python examples/exactly_once.py HOST PORT DATABASE [STOP]

Entries and the position after them are written in one transaction. If the server truncates
entries, they are deleted from the database.
"""

from __future__ import annotations

import sqlite3
import sys

from datastreamer import BlockingClient, Position, Rollback

TABLES = """
CREATE TABLE IF NOT EXISTS entry (number INTEGER, type INTEGER, data BLOB);
CREATE TABLE IF NOT EXISTS place (id INTEGER PRIMARY KEY CHECK (id = 0), position TEXT);
"""


def load(database: sqlite3.Connection) -> Position | None:
    """The position at which the last run stopped."""
    row = database.execute("SELECT position FROM place").fetchone()
    return None if row is None else Position.from_json(row[0])


def save(database: sqlite3.Connection, position: Position | None) -> None:
    """Store the position, in the caller's transaction."""
    if position is not None:
        database.execute("REPLACE INTO place VALUES (0, ?)", (position.to_json(),))


def follow(host: str, port: int, path: str, stop: int | None) -> None:
    """Continue where the last run stopped, forever or up to, not including, entry `stop`."""
    database = sqlite3.connect(path)
    database.executescript(TABLES)

    def rewind(rollback: Rollback) -> None:
        with database:
            database.execute("DELETE FROM entry WHERE number >= ?", (rollback.to_entry,))
            save(database, rollback.position)

    with (
        BlockingClient(host, port, heartbeat=30) as client,
        client.batches(from_position=load(database), stop=stop, on_rollback=rewind) as batches,
    ):
        for batch in batches:
            with database:  # one transaction
                database.executemany(
                    "INSERT INTO entry VALUES (?, ?, ?)",
                    ((entry.number, entry.type, entry.data) for entry in batch),
                )
                save(database, batches.position)
            print(f"up to entry {batch.next_number - 1}", flush=True)
    database.close()


if __name__ == "__main__":
    if len(sys.argv) < 4:
        sys.exit(__doc__)
    host, port, path, *rest = sys.argv[1:]
    follow(host, int(port), path, int(rest[0]) if rest else None)
