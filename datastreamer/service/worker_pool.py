"""The worker processes that serve a stream which this process, or another one, writes.

Owns the requests to all of them: each truncation or update before its first byte is written, the
shutdown, new certificates, metrics. All accept from the same inherited listeners and share the
limits. `worker_process.py` starts, watches and restarts one process.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import threading
import time
from collections.abc import Callable
from dataclasses import replace

from datastreamer.errors import ServerFailed, UsageError
from datastreamer.format import U64_MAX
from datastreamer.http.ports import Ports
from datastreamer.metrics.exposition import MetricsSnapshot, merge
from datastreamer.metrics.writer_numbers import unready_archive
from datastreamer.server.admission.accept_balance import shared_block
from datastreamer.server.limits import Limits
from datastreamer.service import control_protocol as control
from datastreamer.service.parent_metrics import GatheredMetrics
from datastreamer.service.worker_process import ServingProcess, never
from datastreamer.storage.parts import ChangeBegins, ChangeEnds
from datastreamer.storage.stream import DataStream
from datastreamer.transport.tls import ServerTLS

_log = logging.getLogger(__name__)

# Time limit for workers to confirm the begin, and then the end, of a truncation or update.
_CHANGE_SECONDS = 10.0
# Time limit for workers to read certificates and keys.
_RELOAD_SECONDS = 10.0
_METRICS_SECONDS = 2.0
# Upper limit of any timeout.
_LONGEST = 1_000_000.0
# A commit takes some 3 us to wake a process, and wakes one after another.
_MOST_EARLY = 2


class Workers:
    """`count` processes that serve `stream`; all of them serve when the constructor returns.

    The metrics endpoint is in the worker if there is only one, else in this process. All answer on
    the HTTP port.

    Raises `ServerFailed` if a process does not start, `UsageError`, and `StartAbandoned` if
    `abandoned()` becomes true before all serve; then no process is left.
    """

    def __init__(
        self,
        stream: DataStream,
        ports: Ports,
        limits: Limits,
        tls: ServerTLS | None,
        count: int = 1,
        abandoned: Callable[[], bool] = never,
    ) -> None:
        if count < 1:
            raise UsageError(f"workers must be a whole number from 1, not {count!r}")
        shares = [limits.share(at, count) for at in range(count)]
        self._stream = stream
        self._grace = limits.grace
        self._closed = threading.Lock()
        limited = 0 if limits.max_clients_per_address == 0 else shares[0].max_clients
        self._shared = shared_block(count, limited) if count > 1 else None
        self.processes: list[ServingProcess] = []
        self._metrics: GatheredMetrics | None = None
        # From the begin to the end of a change: the guards of all processes, and those that know.
        self._held = contextlib.ExitStack()
        self._notified: list[ServingProcess] = []
        several = bool(ports.metrics or ports.web) and count > 1
        self._numbers = stream.parts.counters.share() if several else None
        own = ports
        if count > 1:
            http = None if ports.http is None else ports.http.share(count)
            own = replace(ports, metrics=[], http=http)
        try:
            # As many start at a time as there are processors: all at once would all be slow.
            processors = _processors()
            together = max(2, processors)
            for at, share in enumerate(shares):
                if at >= together:
                    self.processes[at - together].wait_until_ready(abandoned)
                self.processes.append(
                    ServingProcess(
                        *(stream, own, share, tls),
                        shared=self._shared,
                        at=at,
                        wakes_early=count <= _MOST_EARLY and count < processors,
                        gathered=self.snapshot if several else None,
                    )
                )
            for process in self.processes[-together:]:
                process.wait_until_ready(abandoned)
        except BaseException:
            for process in self.processes:
                process.give_up()
            self._release()
            raise
        self._stop_reporting = stream.parts.feed.subscribe(self._changing)
        if ports.metrics and count > 1:
            self._metrics = GatheredMetrics(ports.metrics, self.snapshot, self._unready)

    @property
    def serving(self) -> bool:
        """Whether a process is left that is running or being restarted."""
        return any(process.failure is None for process in self.processes)

    def check(self) -> None:
        if not self.serving:
            raise ServerFailed(f"{self.processes[-1].failure}; clients are not served")

    def adopt(self, stream: DataStream) -> None:
        """Restarted processes begin with `stream`, which replaced the previous one at its path;
        running processes find it by themselves."""
        self._stream = stream
        for process in self.processes:
            process.adopt(stream)

    # Requests.

    def drain(self, timeout: float | None) -> bool:
        """Wait until every client was sent all committed entries; False after the timeout."""
        seconds = self._grace if timeout is None else timeout
        answers = self._ask_in(control.DRAIN, seconds)
        return bool(answers) and None not in answers

    def reload_tls(self) -> None:
        """Let all processes read the TLS files again. Raises `ServerFailed`."""
        if None in self._ask(control.RELOAD, b"", _RELOAD_SECONDS):
            raise ServerFailed(
                f"{self._stream.path}: a serving process could not read the TLS files again; see "
                "its message in the log"
            )

    def snapshot(self, limit: int) -> MetricsSnapshot:
        """The merged metrics, with the `limit` clients that have the largest lag. A process that
        does not answer is left out; counters start at 0 when a process restarts."""
        written = {} if self._numbers is None else self._numbers.samples()
        own: MetricsSnapshot = {"time": time.time(), "samples": written, "clients": []}
        return merge([*self.snapshots(limit), own], limit)

    def snapshots(self, limit: int) -> list[MetricsSnapshot]:
        """The metrics of each process that answers."""
        answers = self._ask(control.METRICS, control.NUMBER.pack(limit), _METRICS_SECONDS)
        return [json.loads(answer) for answer in answers if answer is not None]

    def _unready(self) -> str:
        if not self.serving:
            return "no serving process is left"
        return self._stream.parts.feed.misplaced or unready_archive(self._numbers)

    def _ask_in(self, what: bytes, seconds: float, *, last: bool = False) -> list[bytes | None]:
        seconds = max(0.0, min(seconds, _LONGEST))
        words = control.NUMBER.pack(int(seconds * 1000))
        return self._ask(what, words, seconds + 1, last=last)

    def _ask(
        self, what: bytes, words: bytes, timeout: float, *, last: bool = False
    ) -> list[bytes | None]:
        """Send a request to all processes at once; returns the answers of `ServingProcess.answer`
        of those that are alive: a process that has just died has no clients."""
        with contextlib.ExitStack() as stack:
            for process in self.processes:
                stack.enter_context(process.guard)
                process.closing = process.closing or last
            until = time.monotonic() + timeout
            asked = [process.post(what, words, until) for process in self.processes]
            answers = [
                (process, process.answer(number, until))
                for process, number in zip(self.processes, asked, strict=True)
            ]
            return [answer for process, answer in answers if answer is not None or process.alive]

    def _changing(self, event: ChangeBegins | ChangeEnds) -> None:
        """Committed entries are about to change, or have changed: before the first byte is
        written, the processes disconnect the clients that this affects.

        From the begin to the end of a change no process is asked anything else, or restarted.
        Raises `ServerFailed` if a process does not confirm the begin in time: it may still send
        what would change.
        """
        offset = event.offset if isinstance(event, ChangeBegins) else 0
        stop = U64_MAX if event.stop is None else event.stop
        words = control.RANGE.pack(event.start, stop, offset)
        until = time.monotonic() + _CHANGE_SECONDS
        if isinstance(event, ChangeEnds):
            with self._held:
                for process in self._unconfirmed(control.CHANGED, words, until):
                    _log.error("%s; it sends no entries until it continues", self._hangs(process))
            return
        with contextlib.ExitStack() as held:
            for process in self.processes:
                if not process.guard.acquire(timeout=max(0, until - time.monotonic())):
                    raise ServerFailed(f"{self._hangs(process)}; nothing was changed, try again")
                held.callback(process.guard.release)
            self._notified = [p for p in self.processes if not p.closing and p.failure is None]
            hanging = self._unconfirmed(control.CHANGE, words, until)
            if hanging:
                self._unconfirmed(control.CHANGED, words, time.monotonic())
                raise ServerFailed(f"{self._hangs(hanging[0])}; nothing was changed, try again")
            self._held = held.pop_all()

    def _unconfirmed(self, what: bytes, words: bytes, until: float) -> list[ServingProcess]:
        """Send a request about a change to the processes that are notified of it; returns those
        that run and do not confirm it by `until`."""
        asked = [(process, process.post(what, words, until)) for process in self._notified]
        # Each begin that a process was sent is followed by its end.
        self._notified = [process for process, number in asked if number is not None]
        return [
            process
            for process, number in asked
            if process.answer(number, until) is None and not process.ends(until)
        ]

    def _hangs(self, process: ServingProcess) -> str:
        return (
            f"{self._stream.path}: the serving process {process.pid} has not answered for "
            f"{_CHANGE_SECONDS:g} s (it is stopped, starting, or draining); `kill -CONT "
            f"{process.pid}` continues it, `kill -KILL {process.pid}` restarts it"
        )

    # Shutdown.

    def close(self) -> None:
        """Shut all processes down within the limits' grace; return when they have ended."""
        if not self._closed.acquire(blocking=False):
            return
        self._stop_reporting()
        if self._metrics is not None:
            self._metrics.close()
        until = time.monotonic() + self._grace + 1
        self._ask_in(control.QUIT, self._grace, last=True)
        for process in self.processes:
            process.reap(until)
        self._release()

    def hurry(self) -> None:
        """Called in another thread while `close` waits: end the grace period."""
        for process in self.processes:
            if process.closing:
                process.kill()

    def abandon(self) -> None:
        """In the child of a fork: close copies of the parent's descriptors."""
        if self._metrics is not None:
            self._metrics.abandon()
        for process in self.processes:
            process.abandon()
        self._release()

    def _release(self) -> None:
        if self._shared is not None:
            os.close(self._shared)
            self._shared = None


def _processors() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
