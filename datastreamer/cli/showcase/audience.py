"""The clients of the showcase, as the process that started them sees them.

Owns their processes and the threads that read their reports.
"""

from __future__ import annotations

import bisect
import json
import subprocess
import sys
import threading
from typing import Any, Literal, NamedTuple

from datastreamer.cli.shared.exit_codes import Failure


class Commit(NamedTuple):
    """When the commit of an operation was called and when it returned, in ns; its last entry."""

    called: int
    returned: int
    last: int


class Watcher:
    """One client: a process that follows the stream from its first entry."""

    def __init__(self, name: str, joins: float) -> None:
        self.name = name
        self.joins = joins
        self.entries = 0
        self.report: dict[str, Any] = {}
        self._process: subprocess.Popen[str] | None = None
        self._thread: threading.Thread | None = None

    @property
    def state(self) -> Literal["waiting", "running", "done"]:
        if self._process is None:
            return "waiting"
        return "done" if self.report else "running"

    def join(self, host: str, port: int, stop: int) -> None:
        """Begin to follow, up to entry `stop`."""
        module = "datastreamer.cli.showcase.client"
        self._process = subprocess.Popen(
            [sys.executable, "-m", module, host, str(port), str(stop)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._thread = threading.Thread(target=self._listen, name=self.name, daemon=True)
        self._thread.start()

    def _listen(self) -> None:
        assert self._process is not None and self._process.stdout is not None
        for line in self._process.stdout:
            told = json.loads(line)
            self.entries = told["entries"]
            if "digest" in told:
                self.report = told

    def finish(self, seconds: float) -> None:
        """Wait until it has seen everything. Raises `Failure` where it does not in time."""
        if self._thread is not None:
            self._thread.join(seconds)
        if not self.report:
            raise Failure(f"{self.name} stopped at entry {self.entries:,} of the stream")

    def leave(self) -> None:
        """End the process, if it still runs."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            if self._thread is not None:
                self._thread.join()
            if self._process.stdout is not None:
                self._process.stdout.close()

    # What it has seen.

    @property
    def catch_up_rate(self) -> float:
        """Entries a second from joining to the head there was then."""
        seconds = (self.report["caught_up"] - self.report["joined"]) / 1e9
        return float(self.report["head"] / seconds) if seconds > 0 else 0.0

    def latencies(self, commits: list[Commit]) -> list[float]:
        """Milliseconds from commit to receipt, for what was committed while it was live."""
        receipts = self.report["receipts"]
        numbers = [number for number, _ in receipts]
        found = []
        for commit in commits:
            if commit.called > self.report["caught_up"]:
                _, received = receipts[bisect.bisect_right(numbers, commit.last)]
                found.append((received - commit.called) / 1e6)
        return found
