"""``python -m datastreamer.spark.native.process PROTOCOL``: answers the requests of the reader in
Java, which speaks that version of the protocol.

Owns the frames on stdin and stdout: a request is a u32 length and JSON; an answer is any number of
frames with the letter ``A`` (an Arrow IPC stream), then one with ``J`` (JSON) or ``E`` (an error).
A frame is its letter, a u32 length and the content. Numbers are big-endian. The process ends when
stdin does.
"""

from __future__ import annotations

import json
import os
import select
import signal
import struct
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping
from typing import IO, Any, Final

import pyarrow as pa

from datastreamer.errors import DatastreamerError, UsageError
from datastreamer.spark.native import following, plans

PROTOCOL: Final = "6"
"""The version of requests and answers, as the jar of this package speaks it."""

_LENGTH: Final = struct.Struct(">I")


_PLANS: Final[dict[str, Callable[[Mapping[str, Any]], dict[str, Any] | Iterator[Any]]]] = {
    "schema": plans.schema_of,
    "tables": plans.tables,
    "scan": plans.scan,
    "aggregate": plans.aggregate,
    "read": plans.read,
    "live": following.live,
}


def serve(requests: IO[bytes], answers: IO[bytes], protocol: str = PROTOCOL) -> None:
    """Answer requests until there are no more: all of another protocol with an error."""
    # The stream that a streaming query follows.
    followed: following.Following | None = None
    while len(length := requests.read(_LENGTH.size)) == _LENGTH.size:
        request = json.loads(requests.read(*_LENGTH.unpack(length)))
        try:
            if protocol != PROTOCOL:
                raise UsageError(
                    "the reader in Java is of another version than the package datastreamer in "
                    f"{sys.executable}: give Spark the jar that datastreamer.spark.native_jar() "
                    "names there, and the same version of the package on all machines"
                )
            what = request["do"]
            if what == "follow":
                followed = following.Following(request)
                found: dict[str, Any] | Iterator[Any] = followed.begun()
            elif what in _PLANS:
                if what == "live":
                    threading.Thread(target=_end_with, args=[requests], daemon=True).start()
                found = _PLANS[what](request)
            else:
                assert followed is not None
                found = following.ANSWERS[what](followed, request)
            if isinstance(found, Iterator):
                for batch in found:
                    _put(answers, b"A", _as_stream(batch))
                    answers.flush()
                found = {}
            _put(answers, b"J", json.dumps(found).encode())
        except Exception as error:  # noqa: BLE001 - the JVM raises it
            _put(answers, b"E", _described(error).encode())
        answers.flush()


def _end_with(requests: IO[bytes]) -> None:
    """End the process when the JVM does: no request is read while rows are awaited."""
    waiting = select.poll()
    waiting.register(requests.fileno(), 0)  # of a hang-up alone
    waiting.poll()
    os._exit(0)


def _put(answers: IO[bytes], letter: bytes, content: bytes | memoryview) -> None:
    answers.write(letter + _LENGTH.pack(len(content)))
    answers.write(content)


def _as_stream(batch: Any) -> memoryview:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema) as writer:
        writer.write_batch(batch)
    return memoryview(sink.getvalue())


def _described(error: Exception) -> str:
    """As the last line of a traceback; of an error that is not this package's, all lines."""
    if isinstance(error, DatastreamerError):
        return "".join(traceback.format_exception_only(error)).strip()
    return "".join(traceback.format_exception(error)).strip()


def main() -> None:
    # Of Ctrl-C the JVM decides what happens.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # What a library prints must not get between the frames.
    frames = os.dup(1)
    os.dup2(2, 1)
    with os.fdopen(0, "rb") as requests, os.fdopen(frames, "wb") as answers:
        serve(requests, answers, sys.argv[1] if len(sys.argv) > 1 else "")


if __name__ == "__main__":
    main()
