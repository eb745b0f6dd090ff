"""The processes of the reassembly's scenario: producers that lose, shuffle and lie, a consumer.

    python -m tests.consumer.scenario producer NAME FILE PORT PAYLOADS MOST
    python -m tests.consumer.scenario consumer DATABASE PAYLOADS BUDGET PORT PORT PORT

What each of them has follows from its name and the payloads' numbers alone, so that a process
that begins again writes what the one before would have.
"""

from __future__ import annotations

import hashlib
import random
import re
import signal
import sqlite3
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from xxhash import xxh3_64_intdigest

from datastreamer import Backoff, BlockingReassembly, SqliteStore, StreamServer
from datastreamer.reassembly import Conflict, PayloadComplete, Splitter, pack_message

LIAR = "c"
NAMES = ("a", "b", LIAR)
TYPE = 0x10
WINDOW = 300
"""The most payloads by which a message is late."""

LIMIT = 700
"""Of a message; above it headers are nested."""

COMMIT = 400

Message = tuple[bytes, bytes]


def identity(number: int) -> bytes:
    return b"%032d" % number


def digest_of(parts: list[Message]) -> bytes:
    found = hashlib.sha256()
    for key, value in parts:
        if key[0] != 2:
            found.update(len(key).to_bytes(2, "big") + key + value)
    return found.digest()


def parts_of(number: int, most: int) -> dict[bytes, Any]:
    """A payload of 1 to `most` parts, most of them small; 500 in 10,000 payloads are surely there.

    Each has a digest of the rest; one in fifty has enough prefixes for a nested header.
    """
    chance = random.Random(number)
    count = 1 + min(499, int(chance.paretovariate(0.8)))
    if most:
        count = chance.randrange(1, most + 1)
    if number % 2_000 == 7:
        count = 500
    own = identity(number)
    firsts = [b"\x01" + own]
    if number % 50 == 3:
        firsts = [b"\x01" + b"%08d" % at + own[8:] for at in range(30)]
    parts: dict[bytes, Any] = {first: [] for first in firsts}
    for at in range(count - 1):
        first = firsts[at % len(firsts)]
        parts[first].append((at.to_bytes(2, "big"), chance.randbytes(chance.randrange(80))))
    listed = [(first + suffix, value) for first, pairs in parts.items() for suffix, value in pairs]
    return {**parts, b"\x02" + own: [(b"", digest_of(sorted(listed)))]}


def messages_of(number: int, most: int) -> list[Message]:
    return Splitter(LIMIT).split(identity(number), parts_of(number, most))


def likely(key: bytes, what: str, share: float) -> bool:
    """True for that share of all keys."""
    return xxh3_64_intdigest(what.encode() + key) < share * 2**64


def lie_about(key: bytes) -> bool:
    return key[0] == 1 and likely(key, "lie", 0.01)


def who_has(key: bytes) -> list[str]:
    """Each lacks 30 % of the messages, and each message is with one at least."""
    found = [name for name in NAMES if likely(key, name, 0.7)]
    return found or [NAMES[key[-1] % len(NAMES)]]


def published_by(name: str, payloads: int, most: int) -> Iterator[Message]:
    """What one producer sends, in its order."""
    chance = random.Random(name)
    waiting: list[tuple[float, int, Message]] = []
    serial = 0
    for number in range(payloads + 1):
        ready = sorted(each for each in waiting if each[0] < number or number == payloads)
        if number % 50 == 0 or number == payloads:
            yield from (message for _, _, message in ready)
            waiting = [each for each in waiting if each[0] >= number and number < payloads]
        if number == payloads:
            return
        for key, value in messages_of(number, most):
            if name in who_has(key):
                lie = b"!" if name == LIAR and lie_about(key) else b""
                serial += 1
                waiting.append((number + chance.uniform(0, WINDOW), serial, (key, value + lie)))


def produce(name: str, path: str, port: int, payloads: int, most: int) -> None:
    """Write what is not there yet while it is served; then serve on, until it is killed."""
    with StreamServer(
        path, host="127.0.0.1", port=port, create=True, sync="os", index="memory"
    ) as server:
        stream = server.stream
        done = stream.total_entries
        print(f"serving from {done}", flush=True)
        run: list[bytes] = []
        for at, message in enumerate(published_by(name, payloads, most)):
            if at < done:
                continue
            run.append(pack_message(*message))
            if len(run) == COMMIT:
                write(stream, run)
                print(f"at {stream.total_entries}", flush=True)
        write(stream, run)
        print(f"all {stream.total_entries}", flush=True)
        signal.pause()


def write(stream: Any, run: list[bytes]) -> None:
    if run:
        with stream.atomic_op() as op:
            op.add_entries(TYPE, run)
        run.clear()


TABLES = """
CREATE TABLE IF NOT EXISTS payload (id BLOB, sound INTEGER, parts BLOB);
CREATE TABLE IF NOT EXISTS conflict (what TEXT, key BLOB, source TEXT);
"""


def consume(path: str, payloads: int, budget: int, ports: list[int]) -> None:
    """Take payloads into a database until all are there."""
    database = sqlite3.connect(path)
    database.executescript("PRAGMA journal_mode=WAL; PRAGMA synchronous=NORMAL;" + TABLES)
    [(done,)] = database.execute("SELECT COUNT(*) FROM payload")
    most_used = 0

    def note(event: object) -> None:
        if isinstance(event, Conflict):
            row = (event.what, event.key, event.source)
            database.execute("INSERT INTO conflict VALUES (?, ?, ?)", row)
        else:
            print(f"event {event!r:.200}", flush=True)

    upstreams = {name: ("127.0.0.1", port) for name, port in zip(NAMES, ports, strict=True)}
    with BlockingReassembly(
        upstreams,
        store=SqliteStore(database),
        on_event=note,
        budget=budget,
        backoff=Backoff(0.05, 0.2),
        follow=True,
    ) as reassembly:
        print(f"begins at {done}", flush=True)
        for item in reassembly:
            assert isinstance(item, PayloadComplete)
            [reported] = [value for key, value in item.parts if key[0] == 2]
            keys = b"".join(hashlib.sha256(k + b"=" + v).digest()[:8] for k, v in item.parts)
            database.execute(
                "INSERT INTO payload VALUES (?, ?, ?)",
                (item.id, reported == digest_of(item.parts), keys),
            )
            done += 1
            if done % 100 == 0:
                most_used = max(most_used, reassembly.stats.used)
                print(f"done {done}", flush=True)
            if done == payloads:
                break
        stats = reassembly.stats
    # (getrusage includes, in a new process, its parent's.)
    peak = re.findall(r"VmHWM:\s*(\d+)", Path("/proc/self/status").read_text())[0]
    print(f"end used {most_used} peak {peak} dropped {stats.dropped}", flush=True)


if __name__ == "__main__":
    role, *rest = sys.argv[1:]
    if role == "producer":
        produce(rest[0], rest[1], *map(int, rest[2:]))
    else:
        consume(rest[0], int(rest[1]), int(rest[2]), list(map(int, rest[3:])))
