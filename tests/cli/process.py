"""Commands as processes: a test starts them, waits for their output and sends signals."""

from __future__ import annotations

import fcntl
import os
import pty
import queue
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

ROOT = Path(__file__).resolve().parent.parent.parent
PATIENCE = 150.0  # of what hangs; a process may start slowly beside other work

ENVIRONMENT = {
    **os.environ,
    "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
    "PYTHONWARNINGS": "error",
    "COLUMNS": "100",
    # No command notes the servers that it has connected to.
    "XDG_STATE_HOME": os.devnull,
}


def command(*words: object, module: str = "datastreamer") -> list[str]:
    return [sys.executable, "-m", module, *map(str, words)]


class Lines:
    """The lines that a process writes to one of its streams; each wait has a time limit."""

    def __init__(self, source: IO[str]) -> None:
        self.seen: list[str] = []
        self._ended = False
        self._queue: queue.Queue[str | None] = queue.Queue()
        self._thread = threading.Thread(target=self._read, args=(source,), daemon=True)
        self._thread.start()

    def _read(self, source: IO[str]) -> None:
        for line in source:
            self._queue.put(line.rstrip("\n"))
        self._queue.put(None)

    def next(self) -> str | None:
        """The next line; None at the end."""
        if self._ended:
            return None
        line = self._queue.get(timeout=PATIENCE)
        if line is None:
            self._ended = True
        else:
            self.seen.append(line)
        return line

    def until(self, pattern: str) -> re.Match[str]:
        """The next line that has `pattern`."""
        while (line := self.next()) is not None:
            if found := re.search(pattern, line):
                return found
        raise AssertionError(f"no line with {pattern!r} in {self.seen}")

    def rest(self) -> list[str]:
        """The remaining lines, up to the end of the stream."""
        lines = []
        while (line := self.next()) is not None:
            lines.append(line)
        return lines


class Running:
    """A running process."""

    def __init__(self, words: list[str], cwd: Path) -> None:
        self.process = subprocess.Popen(
            words,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=cwd,
            env=ENVIRONMENT,
        )
        assert self.process.stdout is not None
        assert self.process.stderr is not None
        self.out = Lines(self.process.stdout)
        self.err = Lines(self.process.stderr)

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def wait(self) -> int:
        """The exit code."""
        return self.process.wait(PATIENCE)

    def port(self) -> int:
        """The port that a server logs."""
        return int(self.err.until(r"serving .* on .*?:(\d+)")[1])


@contextmanager
def running(*words: object, cwd: Path, module: str = "datastreamer") -> Iterator[Running]:
    """A process that is killed at the end of the block."""
    started = Running(command(*words, module=module), cwd)
    try:
        yield started
    finally:
        started.process.kill()
        started.process.wait()
        started.out.rest()
        started.err.rest()
        for stream in (started.process.stdout, started.process.stderr):
            assert stream is not None
            stream.close()


def done(
    *words: object, cwd: Path, module: str = "datastreamer"
) -> subprocess.CompletedProcess[str]:
    """A process that has ended."""
    return subprocess.run(
        command(*words, module=module),
        check=False,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        cwd=cwd,
        env=ENVIRONMENT,
        stdin=subprocess.DEVNULL,
    )


def piped(words: list[str], into: str, cwd: Path) -> tuple[int, str, str]:
    """``words | into``: exit code of the first, output of the second, errors of both."""
    reader = subprocess.Popen(
        into, shell=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert reader.stdin is not None
    writer = subprocess.Popen(
        words, stdout=reader.stdin, stderr=subprocess.PIPE, text=True, cwd=cwd, env=ENVIRONMENT
    )
    reader.stdin.close()
    reader.stdin = None
    try:
        errors = writer.communicate(timeout=PATIENCE)[1]
        output = reader.communicate(timeout=PATIENCE)[0]
    finally:
        writer.kill()
        reader.kill()
    return writer.returncode, output, errors


def on_terminal(words: list[str], cwd: Path, columns: int = 90) -> tuple[int, str]:
    """Exit code and output of a process that has a terminal for all its streams."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
    environment = {key: value for key, value in ENVIRONMENT.items() if key != "COLUMNS"}
    process = subprocess.Popen(
        words,
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        cwd=cwd,
        env={**environment, "TERM": "xterm-256color"},
        start_new_session=True,
    )
    os.close(theirs)
    shown = b""
    try:
        with suppress(OSError):  # on Linux, when the other end was closed
            while part := os.read(ours, 65536):
                shown += part
        code = process.wait(PATIENCE)
    finally:
        process.kill()
        process.wait()
        os.close(ours)
    return code, re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown.decode()).replace("\r\n", "\n")


@contextmanager
def terminal(
    words: list[str], cwd: Path, environment: dict[str, str]
) -> Iterator[tuple[Callable[[str], str], Callable[[str], None]]]:
    """An interactive process: functions that read its terminal up to a pattern, of which they
    return the last group, and that type a text."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 120, 0, 0))
    process = subprocess.Popen(
        ["setsid", "--ctty", *words],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        cwd=cwd,
        env=environment,
    )
    os.close(theirs)
    shown = ""

    def read_until(pattern: str) -> str:
        nonlocal shown
        while (found := re.search(pattern, shown)) is None:
            ready, _, _ = select.select([ours], [], [], PATIENCE)
            assert ready, f"no {pattern!r} in {shown!r}"
            shown += os.read(ours, 65536).decode()
        shown = shown[found.end() :]
        return found[found.lastindex or 0]

    def write(text: str) -> None:
        os.write(ours, text.encode())

    try:
        yield read_until, write
    finally:
        process.kill()
        process.wait()
        os.close(ours)
