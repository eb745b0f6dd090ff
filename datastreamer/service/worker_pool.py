"""The processes that serve what this one writes, or what another writes: one or several.

Owns what they are told together: every change of what was committed, before its first
byte is touched, the end, new certificates. All accept from the same inherited listeners;
together they let in as many clients as the limits say. A process's own life is
`process.py`'s.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from datastreamer.errors import ServerFailed, UsageError
from datastreamer.format import U64_MAX
from datastreamer.metrics.exposition import MetricsSnapshot, merge
from datastreamer.server.admission.accept_balance import shared_block
from datastreamer.server.limits import Limits
from datastreamer.service import control_protocol as control
from datastreamer.service.worker_process import ServingProcess, never
from datastreamer.storage.stream import DataStream
from datastreamer.transport.tls import ServerTLS

if TYPE_CHECKING:
    from datastreamer.service.aggregate_metrics import GatheredMetrics

_log = logging.getLogger(__name__)

# So long a truncation or update waits for the processes to say that it may begin.
_CHANGE_SECONDS = 10.0
# So long they may take to read certificates and keys.
_RELOAD_SECONDS = 10.0
_STATS_SECONDS = 2.0
# More seconds than that are not waited for.
_LONGEST = 1_000_000.0


class Workers:
    """`count` processes that serve `stream`; all of them do when this is made.

    Metrics are answered with on the listeners `metrics`, by a single process itself, for several
    of them by this one.

    Raises `ServerFailed` where one does not start, `UsageError`, and `Unwanted` when `unwanted()`
    has become true before all serve; then nothing is left.
    """

    def __init__(
        self,
        stream: DataStream,
        listeners: list[socket.socket],
        limits: Limits,
        tls: ServerTLS | None,
        count: int = 1,
        metrics: Sequence[socket.socket] = (),
        unwanted: Callable[[], bool] = never,
    ) -> None:
        if count < 1:
            raise UsageError(f"workers are a whole number from 1, not {count!r}")
        shares = [limits.share(at, count) for at in range(count)]
        self._stream = stream
        self._grace = limits.grace
        self._closed = threading.Lock()
        told = 0 if limits.max_clients_per_address == 0 else shares[0].max_clients
        self._shared = shared_block(count, told) if count > 1 else None
        self.processes: list[ServingProcess] = []
        self._metrics: GatheredMetrics | None = None
        several = bool(metrics) and count > 1
        self._numbers = stream.share_numbers() if several else None
        own = () if several else metrics
        try:
            # As many start together as there are processors: with all of them none were quick.
            together = max(2, os.cpu_count() or 1)
            for at, share in enumerate(shares):
                if at >= together:
                    self.processes[at - together].wait_until_ready(unwanted)
                self.processes.append(
                    ServingProcess(
                        *(stream, listeners, share, tls),
                        shared=self._shared,
                        at=at,
                        metrics=own,
                        gathered=several,
                    )
                )
            for process in self.processes[-together:]:
                process.wait_until_ready(unwanted)
        except BaseException:
            for process in self.processes:
                process.give_up()
            self._release()
            raise
        self._end_telling = stream.on_change(self._changing)
        if several:
            from datastreamer.service.aggregate_metrics import GatheredMetrics

            self._metrics = GatheredMetrics(metrics, self.snapshot, self._unready)

    @property
    def pids(self) -> list[int]:
        """The serving processes."""
        return [process.pid for process in self.processes]

    @property
    def serving(self) -> bool:
        """Whether one is left; the others may have died again and again, which the log says."""
        return any(process.failure is None for process in self.processes)

    def check(self) -> None:
        """Raises `ServerFailed` where none is left that serves."""
        if not self.serving:
            raise ServerFailed(f"{self.processes[-1].failure}; nobody is served")

    def adopt(self, stream: DataStream) -> None:
        """Processes that are started from now on begin with `stream`, which is at the path of
        the one before; those that run find it by themselves."""
        self._stream = stream
        for process in self.processes:
            process.adopt(stream)

    # Questions.

    def drain(self, timeout: float | None) -> bool:
        """Wait until every client has been sent all that is committed; whether that is so."""
        seconds = self._grace if timeout is None else timeout
        answers = self._ask_in(control.DRAIN, seconds)
        return bool(answers) and None not in answers

    def reload_tls(self) -> None:
        """Have them read the files for TLS again. Raises `ServerFailed`."""
        if None in self._ask(control.RELOAD, b"", _RELOAD_SECONDS):
            raise ServerFailed(
                f"{self._stream.path}: a serving process did not read the TLS files again; its "
                "own message says why"
            )

    def stats(self) -> list[dict[str, Any]]:
        """What each process has done since it was started, by the names of `Counts`, and how
        many "clients" it has. One that does not answer, or is just started again, is left out.
        """
        answers = self._ask(control.STATS, b"", _STATS_SECONDS)
        return [json.loads(told) for told in answers if told is not None]

    def snapshot(self, limit: int) -> MetricsSnapshot:
        """What they tell together, with the `limit` clients furthest behind; one that does not
        answer is left out. What they have counted begins again with a process."""
        answers = self._ask(control.METRICS, control.NUMBER.pack(limit), _STATS_SECONDS)
        parts: list[MetricsSnapshot] = [json.loads(told) for told in answers if told is not None]
        written = {} if self._numbers is None else self._numbers.samples()
        own: MetricsSnapshot = {"time": time.time(), "samples": written, "clients": []}
        return merge([*parts, own], limit)

    def _unready(self) -> str:
        return self._stream.misplaced if self.serving else "no serving process is left"

    def _ask_in(self, what: bytes, seconds: float, *, last: bool = False) -> list[bytes | None]:
        seconds = max(0.0, min(seconds, _LONGEST))
        words = control.MILLISECONDS.pack(int(seconds * 1000))
        return self._ask(what, words, seconds + 1, last=last)

    def _ask(
        self, what: bytes, words: bytes, timeout: float, *, last: bool = False
    ) -> list[bytes | None]:
        """Ask all at once; the answers, as `ServingProcess.answer` gives them, of those that
        are there: one that has just died has no clients, and begins anew with all there is."""
        with contextlib.ExitStack() as stack:
            for process in self.processes:
                stack.enter_context(process.guard)
                process.closing = process.closing or last
            until = time.monotonic() + timeout
            asked = [process.post(what, words) for process in self.processes]
            answers = [
                (process, process.answer(number, until))
                for process, number in zip(self.processes, asked, strict=True)
            ]
            return [told for process, told in answers if told is not None or process.alive]

    def _changing(self, start: int, stop: int | None, done: bool) -> None:
        """Committed entries are about to change, or have changed: the processes end whom that
        concerns, and no other, before the first byte is touched."""
        what = control.CHANGED if done else control.CHANGE
        words = control.RANGE.pack(start, U64_MAX if stop is None else stop)
        with contextlib.ExitStack() as stack:
            for process in self.processes:
                stack.enter_context(process.guard)
            told: Sequence[ServingProcess] = [
                each for each in self.processes if not each.closing and each.failure is None
            ]
            asked = [each.post(what, words) for each in told]
            until = time.monotonic() + _CHANGE_SECONDS
            for each, number in zip(told, asked, strict=True):
                if each.answer(number, until) is None:
                    _log.error(
                        "%s: the serving process does not answer; it is ended, and started again",
                        self._stream.path,
                    )
                    each.kill()

    # The end.

    def close(self) -> None:
        """End them in good order, within the limits' grace; return when they are gone."""
        if not self._closed.acquire(blocking=False):
            return
        self._end_telling()
        if self._metrics is not None:
            self._metrics.close()
        until = time.monotonic() + self._grace + 1
        self._ask_in(control.QUIT, self._grace, last=True)
        for process in self.processes:
            process.reap(until)
        self._release()

    def hurry(self) -> None:
        """While `close` waits, in another thread: wait for nobody any more."""
        for process in self.processes:
            if process.closing:
                process.kill()

    def abandon(self) -> None:
        """In the child of a fork: give up what is the parent's."""
        if self._metrics is not None:
            self._metrics.abandon()
        for process in self.processes:
            process.abandon()
        self._release()

    def _release(self) -> None:
        if self._shared is not None:
            os.close(self._shared)
            self._shared = None
