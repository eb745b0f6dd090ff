"""The Go reference implementation as a child process, spoken to in lines.

Owns building the program in ``peer/`` (once; it is kept beside the environment's
own files) and the life of its processes: every wait has a limit, and leaving a
`with` block ends the process. Knows nothing of datastreamer.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import hashlib
import json
import os
import queue
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.ports import free_port
from tests.programs import missing, needs

# The C code of go-ethereum takes longer to build than the programs run.
GO_ENVIRONMENT = {
    "CGO_ENABLED": "0",
    "GOFLAGS": "-buildvcs=false '-ldflags=-s -w'",
}
SOURCE = Path(__file__).resolve().parent / "peer"
Answer = dict[str, Any]


class PeerFailed(Exception):
    """The peer refused a command, ended too early, or did not answer in time."""


# The marks of every test module in this folder.
beside_reference = [pytest.mark.interop, needs("go")]


@functools.cache
def build(source: Path = SOURCE) -> Path:
    """The path of the program in a folder, built if its sources or the compiler changed.

    The first build fetches the pinned modules through Go's own proxy. Raises `PeerFailed`.
    """
    go = shutil.which("go")
    assert go is not None, missing("go")
    version = subprocess.run([go, "version"], check=True, capture_output=True).stdout
    state = hashlib.sha256(version)
    for name in ("main.go", "go.mod", "go.sum"):
        state.update((source / name).read_bytes())
    in_venv = sys.prefix != sys.base_prefix
    cache = Path(sys.prefix) if in_venv else Path.home() / ".cache" / "datastreamer-tests"
    folder = cache / "interop"
    program = folder / f"{source.name}-{state.hexdigest()[:16]}"
    if program.exists():
        return program
    folder.mkdir(parents=True, exist_ok=True)
    # Builds at the same time would compile the same packages.
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if program.exists():
            return program
        for old in folder.glob(f"{source.name}-*"):
            old.unlink()
        unfinished = folder / f"building-{os.getpid()}"
        done = subprocess.run(
            [go, "build", "-o", unfinished, "."],
            cwd=source,
            env={**os.environ, **GO_ENVIRONMENT},
            check=False,
            capture_output=True,
            text=True,
            timeout=300,
        )
        if done.returncode:
            raise PeerFailed(f"`go build` in {source} failed: {done.stderr.strip()}")
        unfinished.replace(program)
    return program


def _word(data: bytes) -> str:
    return data.hex() or "-"


class GoPeer:
    """One process of the peer in one role; a context manager.

    Use `GoPeer.serve`, `GoPeer.relay`, `GoPeer.client`, or `GoPeer.read`, which
    runs to its end. Methods named after commands return the decoded answer, or raise
    `PeerFailed` with the reference's own words.
    """

    def __init__(self, role: str, *options: object, timeout: float = 60.0) -> None:
        self.timeout = timeout
        self.process = subprocess.Popen(
            [build(), role, *map(str, options)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self._answers: queue.SimpleQueue[Answer | None] = queue.SimpleQueue()
        self._entries: queue.SimpleQueue[Answer | None] = queue.SimpleQueue()
        self._log: list[str] = []
        self._threads = [
            threading.Thread(target=self._read_answers, daemon=True),
            threading.Thread(target=self._read_log, daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    @classmethod
    def serve(
        cls,
        file: str | os.PathLike[str],
        *,
        port: int = 0,
        version: int = 1,
        system_id: int = 0,
        stream_type: int = 1,
    ) -> GoPeer:
        """The reference's server over `file`, created if it is not there.

        It names its bookmark folder by the path up to the first dot of all, so no
        folder on the way to `file` may have one.
        """
        options = _file_options(file, port, version, system_id, stream_type)
        return cls("serve", *options)._ready()

    @classmethod
    def relay(
        cls, upstream: tuple[str, int], file: str | os.PathLike[str], *, stream_type: int = 1
    ) -> GoPeer:
        """The reference's relay of `upstream`."""
        options = _file_options(file, 0, 1, 0, stream_type)
        return cls("relay", "--address", _address(upstream), *options)._ready()

    @classmethod
    def client(cls, server: tuple[str, int], *, stream_type: int = 1) -> GoPeer:
        """The reference's client, connected; see `start`, `stop`, `entries`."""
        options = ("--address", _address(server), "--stream-type", stream_type)
        return cls("client", *options)._ready()

    @classmethod
    def read(
        cls,
        server: tuple[str, int],
        *,
        start: int = 0,
        bookmark: bytes = b"",
        count: int = 0,
        stream_type: int = 1,
        digest: bool = True,
        timeout: float = 60.0,
    ) -> Answer:
        """The reference's client takes `count` entries (0: all that are there).

        Returns ``entries``, ``bytes``, ``seconds``, and with `digest` ``sha256``,
        over the entries as they are stored in the file. It fails if the numbers do not
        follow one another, and if the client had to warn of anything (a lost
        connection, say: it connects again by itself).
        """
        options: list[object] = ["--address", _address(server), "--from", start, "--count", count]
        options += ["--stream-type", stream_type, "--timeout", f"{timeout}s"]
        if bookmark:
            options += ["--bookmark", bookmark.hex()]
        if digest:
            options.append("--digest")
        with cls("read", *options, timeout=timeout + 5) as peer:
            answer = peer._answer()
            peer.process.wait(peer.timeout)
            for thread in peer._threads:
                thread.join(peer.timeout)
            if peer._log:
                raise PeerFailed(f"the reference's client warned: {peer._log}")
            return answer

    def _ready(self) -> GoPeer:
        try:
            self.header_at_start = self._answer()
        except BaseException:
            self.kill()
            raise
        self.port: int = self.header_at_start.get("port", 0)
        return self

    @property
    def address(self) -> tuple[str, int]:
        """Where a server or relay listens."""
        return ("127.0.0.1", self.port)

    @property
    def warnings(self) -> list[str]:
        """What the reference logged so far, warnings and above."""
        return list(self._log)

    # --- the conversation ---

    def _read_answers(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            answer = json.loads(line)
            if "entry" in answer:
                self._entries.put(answer["entry"])
            else:
                self._answers.put(answer)
        self._answers.put(None)
        self._entries.put(None)

    def _read_log(self) -> None:
        assert self.process.stderr is not None
        self._log.extend(line.rstrip() for line in self.process.stderr)

    def _take(self, lines: queue.SimpleQueue[Answer | None], timeout: float, what: str) -> Answer:
        try:
            taken = lines.get(timeout=timeout)
        except queue.Empty:
            raise PeerFailed(f"no {what} in {timeout} s; log: {self._log}") from None
        if taken is None:
            lines.put(None)
            raise PeerFailed(f"the peer ended where an {what} was due; log: {self._log}")
        return taken

    def _answer(self) -> Answer:
        answer = self._take(self._answers, self.timeout, "answer")
        if not answer.pop("ok"):
            raise PeerFailed(answer["error"])
        return answer

    def do(self, command: str, *words: object) -> Answer:
        """Send one command and wait for its answer."""
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(" ".join([command, *map(str, words)]) + "\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            raise PeerFailed(f"the peer has exited; log: {self._log}") from None
        return self._answer()

    # --- as a server ---

    def start_op(self) -> None:
        self.do("start_op")

    def add_bookmark(self, key: bytes) -> int:
        number: int = self.do("bookmark", _word(key))["number"]
        return number

    def add_entry(self, type: int, data: bytes) -> int:
        number: int = self.do("entry", type, _word(data))["number"]
        return number

    def commit(self) -> None:
        self.do("commit")

    def rollback(self) -> None:
        self.do("rollback")

    def truncate(self, number: int) -> None:
        self.do("truncate", number)

    def update(self, number: int, type: int, data: bytes) -> None:
        self.do("update", number, type, _word(data))

    def get_header(self) -> Answer:
        """``version``, ``system_id``, ``total_length``, ``total_entries``: its own
        view, uncommitted entries counted."""
        return self.do("get_header")

    def get_entry(self, number: int) -> Answer:
        """``number``, ``type``, ``length`` (of the data), ``data`` (hex)."""
        return self.do("get_entry", number)

    def get_bookmark(self, key: bytes) -> int:
        number: int = self.do("get_bookmark", _word(key))["number"]
        return number

    def first_event(self, key: bytes) -> Answer:
        return self.do("first_event", _word(key))

    def between(self, first: bytes, last: bytes) -> bytes:
        return bytes.fromhex(self.do("between", _word(first), _word(last))["data"])

    def append(
        self,
        operations: int,
        entries: int = 5,
        size: int = 200,
        *,
        rate: int = 0,
        bookmarks: bool = False,
    ) -> Answer:
        """Commit generated operations, `rate` a second (0: as fast as it goes).

        Each entry begins with the u64 of the nanoseconds since 1970 at which its
        operation began. Returns ``entries`` and ``seconds``. With `bookmarks` each
        operation begins with one: ``00`` and the u64 of the operation's number.
        """
        return self.do("append", operations, entries, size, rate, int(bookmarks))

    # --- as a client ---

    def start(self, number: int = 0) -> None:
        self.do("start", number)

    def start_bookmark(self, key: bytes) -> None:
        self.do("start_bookmark", _word(key))

    def stop(self) -> None:
        self.do("stop")

    def header(self) -> Answer:
        return self.do("header")

    def entry(self, number: int) -> Answer:
        return self.do("entry", number)

    def bookmark(self, key: bytes) -> Answer:
        return self.do("bookmark", _word(key))

    def entries(self, count: int, timeout: float | None = None) -> Iterator[Answer]:
        """The next `count` streamed entries, waited for up to `timeout` s in all."""
        end = time.monotonic() + (self.timeout if timeout is None else timeout)
        for _ in range(count):
            yield self._take(self._entries, max(0.0, end - time.monotonic()), "entry")

    # --- its end ---

    def close(self) -> None:
        """End it in good order: no bytes of a server's file are lost."""
        if self.process.poll() is None:
            with contextlib.suppress(PeerFailed):
                self.do("exit")
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(self.timeout)
        self.kill()

    def kill(self) -> None:
        """End it at once, as a crash would."""
        self.process.kill()
        self.process.wait()
        for thread in self._threads:
            thread.join()
        for pipe in (self.process.stdin, self.process.stdout, self.process.stderr):
            assert pipe is not None
            with contextlib.suppress(BrokenPipeError):
                pipe.close()

    def __enter__(self) -> GoPeer:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if kind is None:
            self.close()
        else:
            self.kill()


def _address(address: tuple[str, int]) -> str:
    host, port = address[:2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _file_options(
    file: str | os.PathLike[str], port: int, version: int, system_id: int, stream_type: int
) -> list[object]:
    path = Path(file)
    if "." in str(path.parent):
        raise ValueError(f"{path}: the reference misplaces its bookmarks under a dotted folder")
    options: list[object] = ["--file", path, "--port", port or free_port(), "--version", version]
    return [*options, "--system-id", system_id, "--stream-type", stream_type]
