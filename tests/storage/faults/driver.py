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
from datastreamer.storage.maintain.snapshot import snapshot

OPENERS: dict[str, Callable[..., DataStream]] = {
    "create": DataStream.create,
    "open": DataStream.open,
}


def add(stream: DataStream, data: str) -> None:
    if not stream.atomic_op().is_open:
        stream.start_atomic_op()
    stream.add_entry(1, data.encode())


ACTIONS: dict[str, Callable[..., Any]] = {
    "add": add,
    "commit": DataStream.commit_atomic_op,
    "roll back": DataStream.rollback_atomic_op,
    "sync": DataStream.sync,
    "truncate": DataStream.truncate,
    "update": lambda stream, number, data: stream.update_entry(number, 1, data.encode()),
    "snapshot": lambda stream, out: snapshot(stream.path, out).header.total_entries,
    "items": lambda stream: [entry.data.decode() for entry in stream.entries()],
    "close": DataStream.close,
}

logging.disable()
for line in sys.stdin:
    name, *arguments = json.loads(line)
    try:
        answer = None
        if name in OPENERS:
            path, sync = arguments
            stream = OPENERS[name](path, sync=sync)
        else:
            answer = ACTIONS[name](stream, *arguments)
        print(json.dumps([None, answer]), flush=True)
    except DatastreamerError as error:
        print(json.dumps([type(error).__name__, str(error)]), flush=True)
