"""A server for plain synchronous code: what a sequencer embeds.

The caller's process writes. A child process (`child.py`) follows the file and serves
it, so that a writer that keeps its interpreter busy moves no client's latency; or a
thread of the caller's, where that is asked for. Owns the listeners and the child's
life: it is woken by every commit, ends with its parent and is started again if it dies.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable

from datastreamer.errors import ServerFailed, StreamClosed
from datastreamer.net.listen import open_listeners
from datastreamer.storage.stream import DataStream, IndexName, PathLike
from datastreamer.storage.writer import SyncPolicy

_log = logging.getLogger(__name__)

_READY_SECONDS = 30.0
# How often a child that dies is started again before that is given up, and how long
# one has to live to be counted from the beginning.
_ATTEMPTS = 5
_STEADY_SECONDS = 10.0
_FIRST_PAUSE = 0.1
# More seconds than that are not waited for.
_LONGEST = 1_000_000.0

_open_servers: weakref.WeakSet[StreamServer] = weakref.WeakSet()


class StreamServer:
    """A stream that is open for writing, and a server of it.

    ``with StreamServer(path, port=6900) as server:
    with server.stream.atomic_op() as op: ...``

    `create` says what to do where there is no file: make one with `version`,
    `system_id` and `stream_type` (the default), or raise `FileMissing`. `host`, `port`
    and `max_clients` are those of `serve`; `sync` and `index` those of `DataStream`.

    `in_process` serves from a thread of this process: for tests, and for writers that
    are mostly idle.

    Raises `ListenFailed` and what `DataStream.open` raises, all before it returns. Should
    the child die again and again, the next commit raises `ServerFailed` (nothing of it is
    written then).
    """

    def __init__(
        self,
        path: PathLike,
        *,
        host: str | None = None,
        port: int = 6900,
        create: bool = True,
        version: int = 1,
        system_id: int = 0,
        stream_type: int = 1,
        sync: SyncPolicy = "commit",
        index: IndexName = "lmdb",
        max_clients: int = 10_000,
        grace: float = 5.0,
        in_process: bool = False,
    ) -> None:
        self._closed = False
        listeners = open_listeners(host, port)
        self._addresses = [listener.getsockname()[:2] for listener in listeners]
        try:
            if create:
                self.stream = DataStream.open_or_create(
                    path,
                    version=version,
                    system_id=system_id,
                    stream_type=stream_type,
                    sync=sync,
                    index=index,
                )
            else:
                self.stream = DataStream.open(path, stream_type=stream_type, sync=sync, index=index)
            try:
                kind = _Thread if in_process else _Child
                self._serving: _Thread | _Child = kind(self.stream, listeners, max_clients, grace)
            except BaseException:
                self.stream.close()
                raise
        except BaseException:
            for listener in listeners:
                listener.close()
            raise
        self.stream.commit_guard = self._serving.check
        self._listeners = listeners
        _open_servers.add(self)

    @property
    def addresses(self) -> list[tuple[str, int]]:
        """What it listens on: [(host, port), ...]."""
        return self._addresses

    @property
    def port(self) -> int:
        """The TCP port it listens on."""
        return int(self._addresses[0][1])

    def drain(self, timeout: float | None = None) -> bool:
        """Wait until every streaming client has been sent all that is committed.

        True when that is so, False after `timeout` seconds (None: the `grace`).
        """
        if self._closed:
            raise StreamClosed("the server is closed")
        return self._serving.drain(timeout)

    def close(self) -> None:
        """Let the last commit go out (for `grace` seconds at most), then end everything."""
        if self._closed:
            return
        self._closed = True
        try:
            self._serving.close()
        finally:
            for listener in self._listeners:
                listener.close()
            self.stream.close()

    def _abandon(self) -> None:
        """In the child of a fork: give up what is the parent's, and touch nothing."""
        if not self._closed:
            self._closed = True
            self._serving.abandon()
            for listener in self._listeners:
                listener.close()

    def __enter__(self) -> StreamServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Thread:
    """Serving from a thread of this process."""

    def __init__(
        self,
        stream: DataStream,
        listeners: list[socket.socket],
        max_clients: int,
        grace: float,
    ) -> None:
        import trio

        from datastreamer.net.server import Server

        self._grace = grace
        self._server = Server(stream, max_clients=max_clients)
        self._failure: BaseException | None = None
        self._scope = trio.CancelScope()
        self._token: trio.lowlevel.TrioToken | None = None
        self._ready = threading.Event()
        # The listeners stay this object's: the loop gets copies and closes those.
        self._copies = [listener.dup() for listener in listeners]
        self._thread = threading.Thread(
            target=self._run, args=(self._copies,), name=f"server of {stream.path}", daemon=True
        )
        self._thread.start()
        self._ready.wait()
        self.check()

    def _run(self, listeners: list[socket.socket]) -> None:
        import trio

        async def main() -> None:
            self._token = trio.lowlevel.current_trio_token()
            with self._scope:
                async with trio.open_nursery() as nursery:
                    await nursery.start(self._server.run, listeners)
                    self._ready.set()

        try:
            trio.run(main)
        except BaseException as error:  # noqa: BLE001 - whatever it is, `check` raises it
            self._failure = error
            _log.exception("the server ended")
        finally:
            self._ready.set()

    def check(self) -> None:
        if self._failure is not None:
            raise ServerFailed(f"the server ended: {_reason(self._failure)}") from self._failure

    def drain(self, timeout: float | None) -> bool:
        import trio

        from datastreamer.net.server import outside_of_loops

        seconds = self._grace if timeout is None else timeout

        def ask() -> bool:
            return trio.from_thread.run(self._server.drain, seconds, trio_token=self._token)

        try:
            return outside_of_loops(ask)
        except (trio.RunFinishedError, trio.Cancelled):
            return False

    def close(self) -> None:
        import trio

        if self._failure is None and self._token is not None:
            self.drain(None)
            with contextlib.suppress(trio.RunFinishedError):
                self._token.run_sync_soon(self._scope.cancel)
        self._thread.join()

    def abandon(self) -> None:
        for listener in self._copies:
            listener.close()


class _Child:
    """Serving from a child process."""

    def __init__(
        self,
        stream: DataStream,
        listeners: list[socket.socket],
        max_clients: int,
        grace: float,
    ) -> None:
        self._stream = stream
        # As it is now: a child that is started later finds the index by it, too.
        self._name = os.path.abspath(stream.path)
        self._listeners = listeners
        self._max_clients = max_clients
        self._grace = grace
        self._waking, self._waker = _waker()
        self._guard = threading.Lock()
        self._closing = False
        self._failure: str | None = None
        self._control: socket.socket | None = None
        try:
            self._process = self._spawn()
        except BaseException:
            self._release()
            raise
        stream.add_waker(self._waker)
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
                "name": self._name,
                "index": self._stream.index_name,
                "max_clients": self._max_clients,
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
        if told != b"r":
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
            return self._ask(b"d", seconds)

    def _ask(self, what: bytes, seconds: float) -> bool:
        control = self._control
        if control is None:
            return False
        try:
            control.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                control.recv(4096)  # answers that came too late
            seconds = max(0.0, min(seconds, _LONGEST))
            control.settimeout(seconds + 1)
            control.sendall(what + int(seconds * 1000).to_bytes(4, "big"))
            return control.recv(1) == b"y"
        except OSError:
            return False

    def close(self) -> None:
        with self._guard:
            self._closing = True
            if self._failure is None:
                self._ask(b"q", self._grace)
            if self._control is not None:
                self._control.close()
        try:
            self._process.wait(self._grace + 1)
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


def _reason(error: BaseException) -> str:
    """What failed in the end: nurseries wrap it in groups."""
    while inner := getattr(error, "exceptions", ()):
        error = inner[0]
    return str(error) or type(error).__name__


def _abandon_all() -> None:
    for server in list(_open_servers):
        server._abandon()


os.register_at_fork(after_in_child=_abandon_all)


__all__ = ["StreamServer"]
