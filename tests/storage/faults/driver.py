"""A process that does with a stream what its standard input says, a JSON list a line, and answers
each with a line: what came of it, or the error's class and text."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Callable
from typing import Any

from datastreamer import DataStream
from datastreamer.errors import DatastreamerError
from datastreamer.storage.snapshot import snapshot

streams: list[DataStream] = []


def add(data: str) -> None:
    if not streams[-1].atomic_op().is_open:
        streams[-1].start_atomic_op()
    streams[-1].add_entry(1, data.encode())


ACTIONS: dict[str, Callable[..., Any]] = {
    "create": lambda path, sync: streams.append(DataStream.create(path, sync=sync)),
    "open": lambda path, sync: streams.append(DataStream.open(path, sync=sync)),
    "add": add,
    "commit": lambda: streams[-1].commit_atomic_op(),
    "roll back": lambda: streams[-1].rollback_atomic_op(),
    "sync": lambda: streams[-1].sync(),
    "truncate": lambda number: streams[-1].truncate(number),
    "update": lambda number, data: streams[-1].update_entry(number, 1, data.encode()),
    "snapshot": lambda out: snapshot(streams[-1].path, out).header.total_entries,
    "items": lambda: [entry.data.decode() for entry in streams[-1].entries()],
    "close": lambda: streams[-1].close(),
}

logging.disable()
for line in sys.stdin:
    name, *arguments = json.loads(line)
    try:
        answer = ACTIONS[name](*arguments)
        if name in ("create", "open"):
            answer = None
        print(json.dumps([None, answer]), flush=True)
    except DatastreamerError as error:
        print(json.dumps([type(error).__name__, str(error)]), flush=True)
