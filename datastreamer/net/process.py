"""The process that serves what this one writes: `child.py`, seen from its parent.

Owns the child's life: it is woken by every commit, told of every change of what was
committed, ends with its parent and is started again if it dies.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable

from datastreamer.errors import ServerFailed
from datastreamer.format import U64_MAX
from datastreamer.net import control
from datastreamer.net.limits import Limits
from datastreamer.net.log import style_of_log
from datastreamer.net.tls import ServerTLS
from datastreamer.storage.stream import DataStream

_log = logging.getLogger(__name__)

_READY_SECONDS = 30.0
# So long a truncation or update waits for the child to say that it may begin.
_CHANGE_SECONDS = 10.0
# How often a child that dies is started again before that is given up, and how long
# one has to live to be counted from the beginning.
_ATTEMPTS = 5
_STEADY_SECONDS = 10.0
_FIRST_PAUSE = 0.1
# So long the child may take to read certificates and keys.
_RELOAD_SECONDS = 10.0
# More seconds than that are not waited for.
_LONGEST = 1_000_000.0
_ANSWER_BYTES = 1 + control.NUMBER.size


class ServingProcess:
    """A child that serves what this process writes: started, watched, told, ended."""

    def __init__(
        self,
        stream: DataStream,
        listeners: list[socket.socket],
        limits: Limits,
        tls: ServerTLS | None,
        metrics: list[socket.socket],
    ) -> None:
        self._stream = stream
        self._metrics = metrics
        self._numbers = stream.share_numbers() if metrics else None
        # As it is now: a child that is started later finds the index by it, too.
        self._name = os.path.abspath(stream.path)
        self._listeners = listeners
        self._limits = limits
        self._grace = limits.grace
        self._tls = tls
        self._waking, self._waker = _waker()
        self._guard = threading.Lock()
        self._closing = False
        self._failure: str | None = None
        self._control: socket.socket | None = None
        self._asked = 0
        try:
            self._process = self._spawn()
        except BaseException:
            self._release()
            raise
        stream.add_waker(self._waker)
        self._end_telling = stream.on_change(self._changing)
        self._watcher = threading.Thread(
            target=self._watch, name=f"watcher of the server of {stream.path}", daemon=True
        )
        self._watcher.start()

    def _spawn(self) -> subprocess.Popen[bytes]:
        """Start a child and wait until it serves. Raises `ServerFailed`."""
        ours, theirs = socket.socketpair()
        passed: list[int] = []

        def hand_down(fd: int) -> int:
            # Not as 0, 1 or 2, which mean something else in the child.
            passed.append(fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 3))
            return passed[-1]

        try:
            order = {
                "listeners": [hand_down(listener.fileno()) for listener in self._listeners],
                "file": self._hand_down_file(passed),
                "waker": hand_down(self._waking),
                "control": hand_down(theirs.fileno()),
                "parent": self._hand_down_parent(hand_down),
                "metrics": [hand_down(listener.fileno()) for listener in self._metrics],
                "numbers": -1 if self._numbers is None else hand_down(self._numbers.fd),
                "name": self._name,
                "index": self._stream.index_name,
                "limits": self._limits.as_json(),
                "tls": None if self._tls is None else self._tls.to_json(),
                "log_style": style_of_log(),
                "log_level": logging.getLogger("datastreamer").getEffectiveLevel(),
            }
            process = subprocess.Popen(
                [sys.executable, "-m", "datastreamer.net.child", json.dumps(order)],
                stdin=subprocess.DEVNULL,
                pass_fds=passed,
                start_new_session=True,
                env=_environment(),
            )
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
            for fd in passed:
                os.close(fd)
        ours.settimeout(_READY_SECONDS)
        try:
            told = ours.recv(1)
        except OSError:
            told = b""
        if told != control.READY:
            process.kill()
            process.wait()
            ours.close()
            raise ServerFailed(
                f"{self._stream.path}: the serving process did not start "
                f"(exit code {process.returncode}); its own message stands above"
            )
        ours.settimeout(None)
        self._control = ours
        return process

    def _hand_down_file(self, passed: list[int]) -> int:
        """A description of its own, for reading: the writer's holds the lock."""
        # Elsewhere than on Linux /dev/fd gives the same description once more.
        linux = sys.platform == "linux"
        name = f"/dev/fd/{self._stream.fileno()}" if linux else self._name
        file = os.open(name, os.O_RDONLY | os.O_CLOEXEC)
        try:
            passed.append(fcntl.fcntl(file, fcntl.F_DUPFD_CLOEXEC, 3))
        finally:
            os.close(file)
        return passed[-1]

    @staticmethod
    def _hand_down_parent(hand_down: Callable[[int], int]) -> int:
        """What tells the child that this process is gone; -1: the control socket alone."""
        if not hasattr(os, "pidfd_open"):
            return -1
        parent = os.pidfd_open(os.getpid())
        try:
            return hand_down(parent)
        finally:
            os.close(parent)

    def _watch(self) -> None:
        """Start the child again where it dies."""
        failures, pause = 0, _FIRST_PAUSE
        while True:
            started = time.monotonic()
            code = self._process.wait()
            with self._guard:
                if self._closing:
                    return
            lived = time.monotonic() - started
            if lived > _STEADY_SECONDS:
                failures, pause = 0, _FIRST_PAUSE
            failures += 1
            _log.error(
                "%s: the serving process ended (exit code %d) after %.1f s; it is started again",
                self._stream.path,
                code,
                lived,
                extra={"exit_code": code},
            )
            while True:
                if failures > _ATTEMPTS:
                    self._failure = (
                        f"{self._stream.path}: the serving process died {failures} times in a "
                        f"row (last exit code {code}); nobody is served"
                    )
                    _log.error("%s", self._failure)
                    return
                time.sleep(pause)
                pause *= 2
                with self._guard:
                    if self._closing:
                        return
                    try:
                        if self._control is not None:
                            self._control.close()
                        self._process = self._spawn()
                        break
                    except (ServerFailed, OSError) as error:
                        _log.error("%s", error)
                        failures += 1

    def check(self) -> None:
        if self._failure is not None:
            raise ServerFailed(self._failure)

    @property
    def pid(self) -> int:
        """The serving process."""
        return self._process.pid

    def drain(self, timeout: float | None) -> bool:
        seconds = self._grace if timeout is None else timeout
        with self._guard:
            return self._ask(control.DRAIN, seconds)

    def reload_tls(self) -> None:
        """Have the child read the files for TLS again. Raises `ServerFailed`."""
        with self._guard:
            if not self._request(control.RELOAD, b"", _RELOAD_SECONDS):
                raise ServerFailed(
                    f"{self._stream.path}: the serving process did not read the TLS files again; "
                    "its own message says why"
                )

    def _ask(self, what: bytes, seconds: float) -> bool:
        seconds = max(0.0, min(seconds, _LONGEST))
        return self._request(what, control.MILLISECONDS.pack(int(seconds * 1000)), seconds + 1)

    def _request(self, what: bytes, words: bytes, timeout: float) -> bool:
        """What the child says to it: True for yes; False also where it says nothing in time."""
        link = self._control
        if link is None:
            return False
        self._asked = (self._asked + 1) & 0xFFFFFFFF
        number = control.NUMBER.pack(self._asked)
        until = time.monotonic() + timeout
        answers = b""
        try:
            link.settimeout(timeout)
            link.sendall(what + number + words)
            while True:
                # Each is of five bytes; earlier questions' may come first, too late.
                while len(answers) >= _ANSWER_BYTES:
                    answer, answers = answers[:_ANSWER_BYTES], answers[_ANSWER_BYTES:]
                    if answer[1:] == number:
                        return answer[:1] == control.YES
                link.settimeout(max(0.001, until - time.monotonic()))
                got = link.recv(4096)
                if not got:
                    return False
                answers += got
        except OSError:
            return False

    def _changing(self, start: int, stop: int | None, done: bool) -> None:
        """Committed entries are about to change, or have changed: the child ends whom that
        concerns, and no other, before the first byte is touched."""
        what = control.CHANGED if done else control.CHANGE
        words = control.RANGE.pack(start, U64_MAX if stop is None else stop)
        with self._guard:
            if self._closing or self._failure is not None:
                return
            if self._request(what, words, _CHANGE_SECONDS):
                return
            _log.error(
                "%s: the serving process does not answer; it is ended, and started again",
                self._stream.path,
            )
            self._process.kill()

    def close(self) -> None:
        self._end_telling()
        until = time.monotonic() + self._grace + 1
        with self._guard:
            self._closing = True
            if self._failure is None:
                self._ask(control.QUIT, self._grace)
            if self._control is not None:
                self._control.close()
        try:
            self._process.wait(max(0.1, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            self._process.kill()
        self._process.wait()
        self._watcher.join()
        self._stream.remove_waker(self._waker)
        self._release()

    def abandon(self) -> None:
        if self._control is not None:
            self._control.close()
        self._release()

    def _release(self) -> None:
        for fd in {self._waking, self._waker}:
            os.close(fd)


def _waker() -> tuple[int, int]:
    """Two ends, to read and to write, of what tells the child of commits."""
    if hasattr(os, "eventfd"):
        fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        return fd, fd
    reading, writing = os.pipe()
    os.set_blocking(reading, False)
    os.set_blocking(writing, False)
    return reading, writing


def _environment() -> dict[str, str]:
    """The child imports what the parent does, wherever that was found."""
    found = os.pathsep.join(p or os.getcwd() for p in sys.path)
    # And does not take a stray file in the working directory for a module of the library.
    return {**os.environ, "PYTHONPATH": found, "PYTHONSAFEPATH": "1"}
