"""One serving process (`worker_main.py`), seen from its parent.

Owns the child's life: it is woken by every commit, ends with its parent and is restarted if it
dies; and the exchange of requests and answers, which `worker_pool.py` chooses.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict

from datastreamer.errors import ServerFailed
from datastreamer.http.ports import Ports
from datastreamer.server.admission.accept_balance import AcceptBalance
from datastreamer.server.limits import Limits
from datastreamer.service import control_protocol as control
from datastreamer.service.log import style_of_log
from datastreamer.service.parent_metrics import Snapshot, answer_in_thread
from datastreamer.storage.stream import DataStream
from datastreamer.transport.tls import ServerTLS

_log = logging.getLogger(__name__)

_READY_SECONDS = 30.0
# Interval between checks that a starting process is still wanted.
_LOOK_SECONDS = 0.1
# Number of restarts in a row before giving up; a process that lives this long resets the count.
_ATTEMPTS = 5
_STEADY_SECONDS = 10.0
_FIRST_PAUSE = 0.1


class StartAbandoned(Exception):
    """A signal ended the program before all processes were started."""


def never() -> bool:
    return False


class ServingProcess:
    """A child process that serves the stream.

    The constructor starts it; it serves when `wait_until_ready` has returned. `shared` is the
    memory that it shares with the other processes on the same listeners
    (`accept_balance.py`), `at` its number among them. With `wakes_early`, a commit after a pause
    wakes it when it begins, too. That needs a CPU for the process and one for the writer.
    `gathered` has the metrics of all processes on these ports, which each sends on request of its
    parent; None: there is only one.
    """

    def __init__(
        self,
        stream: DataStream,
        ports: Ports,
        limits: Limits,
        tls: ServerTLS | None,
        *,
        shared: int | None = None,
        at: int = 0,
        wakes_early: bool = False,
        gathered: Snapshot | None = None,
    ) -> None:
        self._stream = stream
        self._ports = ports
        self._gathered = gathered
        counted = gathered is None and (ports.metrics or ports.web)
        self._numbers = stream.parts.counters.share() if counted else None
        # The absolute path, by which a child that is started later finds the index.
        self._name = os.path.abspath(stream.path)
        self._limits = limits
        self._tls = tls
        self._at = at
        self._shared = shared
        self._balance = None if shared is None else AcceptBalance(shared, at)
        self._waking: int | None = None
        self._waker: int | None = None
        if not stream.follows:
            self._waking, self._waker = _waker()
        self._early_waker = (
            _eventfd() if wakes_early and not stream.follows and hasattr(os, "eventfd") else None
        )
        self.guard = threading.Lock()
        """Held during requests and restarts: `post` and `answer` need it."""
        self.failure: str | None = None
        """Why it is not restarted any more."""
        self.closing = False
        self._control: socket.socket | None = None
        self._asked = 0
        self._unread = b""
        self._watcher: threading.Thread | None = None
        try:
            self._process, self._starting = self._spawn()
        except BaseException:
            self._release()
            raise

    def wait_until_ready(self, abandoned: Callable[[], bool] = never) -> None:
        """Return when it serves; from then on it is watched, and woken by commits.

        Raises `ServerFailed`, and `StartAbandoned` if `abandoned()` becomes true; then call
        `give_up`.
        """
        self._control = self._ready(self._process, self._starting, abandoned)
        if self._waker is not None:
            self._stream.parts.writer.add_waker(self._waker)
        if self._early_waker is not None:
            self._stream.parts.writer.add_early_waker(self._early_waker)
        watcher = threading.Thread(
            target=self._watch, name=f"watcher of a server of {self._stream.path}", daemon=True
        )
        watcher.start()
        self._watcher = watcher

    def _spawn(self) -> tuple[subprocess.Popen[bytes], socket.socket]:
        """Start a child; it reports on the socket when it serves."""
        ours, theirs = socket.socketpair()
        ports, asking = self._ports, None
        passed: list[int] = []

        def hand_down(fd: int) -> int:
            # Not as 0, 1 or 2, the standard streams.
            passed.append(fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 3))
            return passed[-1]

        def hand_over(fd: int) -> int:
            try:
                return hand_down(fd)
            finally:
                os.close(fd)

        # A separate open file description: the writer's holds the lock. On systems other than
        # Linux, /dev/fd duplicates the same description.
        linux = sys.platform == "linux"
        file = f"/dev/fd/{self._stream.fileno()}" if linux else self._name
        try:
            if ports.web and self._gathered is not None:
                answering, asking = socket.socketpair()
                answer_in_thread(answering, self._gathered)
            order = {
                "http": None if ports.http is None else ports.http.as_json(),
                "clients": [hand_down(listener.fileno()) for listener in ports.clients],
                "metrics": [hand_down(listener.fileno()) for listener in ports.metrics],
                "web": [hand_down(listener.fileno()) for listener in ports.web],
                "asking": None if asking is None else hand_down(asking.fileno()),
                "file": hand_over(os.open(file, os.O_RDONLY | os.O_CLOEXEC)),
                "waker": None if self._waking is None else hand_down(self._waking),
                "early_waker": None if self._early_waker is None else hand_down(self._early_waker),
                "control": hand_down(theirs.fileno()),
                # A pidfd shows the child that this process died; -1: not on this system.
                "parent": hand_over(os.pidfd_open(os.getpid()))
                if hasattr(os, "pidfd_open")
                else -1,
                "turns": None if self._shared is None else hand_down(self._shared),
                "at": self._at,
                # A stream that this process writes is not replaced.
                "changes_streams": self._stream.follows,
                "gathered": self._gathered is not None,
                "numbers": None if self._numbers is None else hand_down(self._numbers.fd),
                "name": self._name,
                "index": self._stream.index_name,
                "limits": asdict(self._limits),
                "tls": None if self._tls is None else self._tls.to_json(),
                "log_style": style_of_log(),
                "log_level": logging.getLogger("datastreamer").getEffectiveLevel(),
            }
            # Block these until the child ignores them: a service manager signals all processes.
            before = signal.pthread_sigmask(signal.SIG_BLOCK, control.OF_PARENT)
            try:
                process = subprocess.Popen(
                    [sys.executable, "-m", "datastreamer.service.worker_main", json.dumps(order)],
                    stdin=subprocess.DEVNULL,
                    pass_fds=passed,
                    start_new_session=True,
                    env=_environment(),
                )
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, before)
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
            if asking is not None:
                asking.close()
            for fd in passed:
                os.close(fd)
        return process, ours

    def _ready(
        self,
        process: subprocess.Popen[bytes],
        ours: socket.socket,
        abandoned: Callable[[], bool] = never,
    ) -> socket.socket:
        """Wait until the child serves. After `ServerFailed` or `StartAbandoned` it has ended."""
        until = time.monotonic() + _READY_SECONDS
        try:
            ours.settimeout(_LOOK_SECONDS)
            answer = None
            while answer is None:
                if abandoned():
                    raise StartAbandoned
                if time.monotonic() >= until:
                    raise ServerFailed(
                        f"{self._stream.path}: the serving process did not start within "
                        f"{_READY_SECONDS:g} s; the machine may be overloaded"
                    )
                try:
                    answer = ours.recv(1)
                except TimeoutError:
                    continue
                except OSError:
                    answer = b""
            if answer != control.READY:
                process.kill()
                process.wait()
                raise ServerFailed(
                    f"{self._stream.path}: the serving process did not start "
                    f"(exit code {process.returncode}); see its message above"
                )
        except BaseException:
            process.kill()
            process.wait()
            ours.close()
            raise
        self._unread = b""
        return ours

    def _watch(self) -> None:
        """Restart the child if it dies."""
        failures, pause = 0, _FIRST_PAUSE
        while True:
            started = time.monotonic()
            code = self._process.wait()
            if self._balance is not None:
                self._balance.leave()
            with self.guard:
                if self.closing:
                    return
            lived = time.monotonic() - started
            if lived > _STEADY_SECONDS:
                failures, pause = 0, _FIRST_PAUSE
            failures += 1
            _log.error(
                "%s: the serving process ended (exit code %d) after %.1f s; restarting it",
                self._stream.path,
                code,
                lived,
                extra={"exit_code": code},
            )
            while True:
                if failures > _ATTEMPTS:
                    self.failure = (
                        f"{self._stream.path}: the serving process died {failures} times in a "
                        f"row (last exit code {code}); it is not restarted"
                    )
                    _log.error("%s", self.failure)
                    return
                time.sleep(pause)
                pause *= 2
                with self.guard:
                    if self.closing:
                        return
                    try:
                        if self._control is not None:
                            self._control.close()
                        self._process, link = self._spawn()
                        self._control = self._ready(self._process, link)
                        break
                    except (ServerFailed, OSError) as error:
                        _log.error("%s", error)
                        failures += 1

    def adopt(self, stream: DataStream) -> None:
        """Serve this stream, which another process writes, after the next restart."""
        with self.guard:
            self._stream = stream

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    # Requests. The caller holds the guard from the request to its answer.

    def post(self, what: bytes, words: bytes, until: float) -> bytes | None:
        """Send a request; returns its number, or None if the process cannot be reached by `until`
        on the monotonic clock."""
        link = self._control
        if link is None or self.failure is not None:
            return None
        self._asked = (self._asked + 1) & 0xFFFFFFFF
        number = control.NUMBER.pack(self._asked)
        try:
            link.settimeout(max(0.001, until - time.monotonic()))
            link.sendall(what + number + words)
        except OSError:
            return None
        return number

    def answer(self, number: bytes | None, until: float) -> bytes | None:
        """The answer to a request, by `until`: the result for yes, None for no and without an
        answer in time."""
        link = self._control
        if number is None or link is None:
            return None
        head = control.ANSWER.size
        try:
            while True:
                # Late answers to earlier requests may arrive first.
                while len(self._unread) >= head:
                    verdict, asked, size = control.ANSWER.unpack_from(self._unread)
                    if len(self._unread) < head + size:
                        break
                    answer = self._unread[head : head + size]
                    self._unread = self._unread[head + size :]
                    if control.NUMBER.pack(asked) == number:
                        return answer if verdict == control.YES else None
                link.settimeout(max(0.001, until - time.monotonic()))
                got = link.recv(65536)
                if not got:
                    return None
                self._unread += got
        except OSError:
            return None

    def ends(self, until: float) -> bool:
        """Whether it has ended, or, having closed its side, ends by `until`."""
        try:
            self._process.wait(max(0, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            return False
        return True

    # Shutdown.

    def kill(self) -> None:
        """Kill it. It is restarted, unless it is being closed."""
        self._process.kill()

    def reap(self, until: float) -> None:
        """After the request to quit, with `closing` set: return when it has ended; it is killed
        after `until`."""
        if self._control is not None:
            self._control.close()
        try:
            self._process.wait(max(0.1, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            self._process.kill()
        self._process.wait()
        if self._watcher is not None:
            self._watcher.join()
        if self._waker is not None:
            self._stream.parts.writer.remove_waker(self._waker)
        if self._early_waker is not None:
            self._stream.parts.writer.remove_waker(self._early_waker)
        self._release()

    def give_up(self) -> None:
        """End a process that is not ready, or is not needed because another did not start."""
        with self.guard:
            self.closing = True
        self._starting.close()
        self._process.kill()
        self.reap(0)

    def abandon(self) -> None:
        """In the child of a fork: close copies of the parent's descriptors."""
        if self._control is not None:
            self._control.close()
        self._release()

    def _release(self) -> None:
        if self._balance is not None:
            self._balance.close()
            self._balance = None
        for fd in {self._waking, self._waker, self._early_waker}:
            if fd is not None:
                os.close(fd)


def _waker() -> tuple[int, int]:
    """The reading and the writing end of the child's wake-up descriptor for commits."""
    if hasattr(os, "eventfd"):
        fd = _eventfd()
        return fd, fd
    reading, writing = os.pipe()
    os.set_blocking(reading, False)
    os.set_blocking(writing, False)
    return reading, writing


def _eventfd() -> int:
    return os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)


def _environment() -> dict[str, str]:
    """The child's environment: it imports modules from the same places as the parent."""
    found = os.pathsep.join(p or os.getcwd() for p in sys.path)
    # PYTHONSAFEPATH: a file in the working directory is not taken for a module.
    return {**os.environ, "PYTHONPATH": found, "PYTHONSAFEPATH": "1"}
