"""What a stream server is for, in 20 seconds: one writer, one server, three clients.

    python examples/showcase.py

The program writes operations at a fixed rate to a stream that it serves. Three clients, each
in its own process, join one after the other, read the stream from entry 0, catch up and stay
live. The table at the end compares the SHA-256 of what each client received with that of the
file, and shows the latency from a commit to its receipt.
"""

from __future__ import annotations

import argparse
import bisect
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from rich import box
from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table

from datastreamer import BlockingClient, DataStream, EntryBatch, StreamServer

ENTRIES_PER_OPERATION = 5
JOIN_TIMES = (0.0, 0.25, 0.5)  # as shares of the whole duration
CATCH_UP_SECONDS = 20.0
FRAME_SECONDS = 0.1
LINE_SECONDS = 1.0
REPORT_NS = 50_000_000


class TimedCommit(NamedTuple):
    """When a commit was called and when it returned, in ns, and the operation's last entry."""

    called: int
    returned: int
    last: int


class Watcher:
    """A client in its own process, which reads the stream from entry 0."""

    def __init__(self, name: str, join_time: float) -> None:
        self.name = name
        self.join_time = join_time
        self.entries = 0
        self.report: dict[str, Any] = {}
        self._process: subprocess.Popen[str] | None = None
        self._thread = threading.Thread(target=self._read_reports, daemon=True)

    def join(self, port: int, stop: int) -> None:
        """Start the process, which reads up to, not including, entry `stop`."""
        self._process = subprocess.Popen(
            [sys.executable, __file__, "--client", str(port), str(stop)],
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self._thread.start()

    def _read_reports(self) -> None:
        assert self._process is not None
        assert self._process.stdout is not None
        for line in self._process.stdout:
            report = json.loads(line)
            self.entries = report["entries"]
            if "digest" in report:
                self.report = report

    @property
    def joined(self) -> bool:
        return self._process is not None

    def finish(self) -> None:
        if self.joined:
            self._thread.join(CATCH_UP_SECONDS)
        if not self.report:
            sys.exit(f"error: {self.name} stopped at entry {self.entries:,} of the stream")

    def kill(self) -> None:
        if self._process is not None and self._process.stdout is not None:
            self._process.kill()
            self._process.wait()
            self._thread.join()
            self._process.stdout.close()

    def state(self, total: int, rate: int) -> str:
        if not self.joined:
            return f"joins at {self.join_time:.0f} s"
        if self.report:
            return "has all"
        # Clients report several times a second; the age of a report does not count as lag.
        near = total - ENTRIES_PER_OPERATION * max(1, rate)
        return "live" if self.entries >= near else "catching up"

    def catch_up_rate(self) -> float:
        """Entries per second from joining to the head at that time."""
        seconds = (self.report["caught_up"] - self.report["joined"]) / 1e9
        return float(self.report["head"] / seconds) if seconds > 0 else 0.0

    def latencies(self, commits: list[TimedCommit]) -> list[float]:
        """Milliseconds from commit to receipt, for the commits after it had caught up."""
        receipts = self.report["receipts"]
        numbers = [number for number, _ in receipts]
        return [
            (receipts[bisect.bisect_right(numbers, commit.last)][1] - commit.called) / 1e6
            for commit in commits
            if commit.called > self.report["caught_up"]
        ]


def follow(port: int, stop: int) -> None:
    """The client's process: read up to entry `stop`, reporting on standard output.

    Times are those of the monotonic clock, which all processes of a machine share.
    """
    digest, receipts = hashlib.sha256(), list[tuple[int, int]]()
    reported = caught_up = 0
    with BlockingClient("127.0.0.1", port, resume=False) as client:
        joined = time.monotonic_ns()
        head = client.header().total_entries
        for batch in client.batches(from_entry=0, stop=stop):
            now = time.monotonic_ns()
            receipts.append((batch.next_number, now))
            digest.update(batch.packed())
            if not caught_up and batch.next_number >= head:
                caught_up = time.monotonic_ns()
            if now - reported >= REPORT_NS:
                reported = now
                print(json.dumps({"entries": batch.next_number}), flush=True)
    report = {
        "entries": receipts[-1][0] if receipts else 0,
        "digest": digest.hexdigest(),
        "head": head,
        "joined": joined,
        "caught_up": caught_up,
        "receipts": receipts,
    }
    print(json.dumps(report), flush=True)


class Screen:
    """Shows the progress: a picture on a terminal, else a line per second."""

    def __init__(self, stream: DataStream, watchers: list[Watcher], rate: int) -> None:
        self._stream = stream
        self._watchers = watchers
        self._rate = rate
        self._began = time.monotonic()
        self._due = 0.0
        self._live = Live(auto_refresh=False) if sys.stdout.isatty() else None

    def __enter__(self) -> Screen:
        if self._live is None:
            total = self._stream.total_entries
            print(f"the stream holds {total:,} entries; the writer now adds more")
        else:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.update(self._picture(), refresh=True)
            self._live.stop()

    def update(self) -> None:
        """Draw, if it is time to."""
        seconds = time.monotonic() - self._began
        if seconds < self._due:
            return
        if self._live is not None:
            self._due = seconds + FRAME_SECONDS
            self._live.update(self._picture(), refresh=True)
            return
        self._due = seconds + LINE_SECONDS
        total = self._stream.total_entries
        states = [f"{each.name} {each.state(total, self._rate)}" for each in self._watchers]
        print(f"{seconds:4.0f} s  {total:,} entries; {', '.join(states)}", flush=True)

    def _picture(self) -> Group:
        total = self._stream.total_entries
        rows = Table.grid(padding=(0, 2))
        rows.add_column(min_width=9)
        rows.add_column(width=30)
        rows.add_column(justify="right", min_width=9)
        rows.add_column(min_width=12)
        rows.add_row("writer", "", f"{total:,}", "entries committed")
        for each in self._watchers:
            bar = ProgressBar(total=max(1, total), completed=each.entries, width=30)
            rows.add_row(each.name, bar, f"{each.entries:,}", each.state(total, self._rate))
        title = (
            f"[bold]One process writes {self._rate} operations/s and serves them, three follow "
            f"from entry 0.  {time.monotonic() - self._began:4.1f} s[/bold]"
        )
        return Group(title, "", rows)


def add_operation(stream: DataStream, number: int) -> None:
    """Add a bookmark and its events to the open operation."""
    stream.add_bookmark(b"operation %d" % number)
    for event in range(1, ENTRIES_PER_OPERATION):
        stream.add_entry(1, hashlib.shake_256(b"%d %d" % (number, event)).digest(200))


def write(
    server: StreamServer,
    watchers: list[Watcher],
    screen: Screen,
    operations: range,
    rate: int,
    stop: int,
) -> list[TimedCommit]:
    """Commit the operations at the rate while the clients join."""
    stream, commits = server.stream, []
    began = time.monotonic()
    for done, number in enumerate(operations):
        time.sleep(max(0.0, began + done / rate - time.monotonic()))
        for watcher in watchers:
            if not watcher.joined and time.monotonic() - began >= watcher.join_time:
                watcher.join(server.port, stop)
        stream.start_atomic_op()
        add_operation(stream, number)
        called = time.monotonic_ns()
        stream.commit_atomic_op()
        commits.append(TimedCommit(called, time.monotonic_ns(), stream.total_entries - 1))
        screen.update()
    return commits


def digest_of(batches: Iterable[EntryBatch]) -> str:
    digest = hashlib.sha256()
    for batch in batches:
        digest.update(batch.packed())
    return digest.hexdigest()


def run(seconds: int, rate: int, history: int) -> None:
    """Run the showcase. Exits with an error where a client did not receive what was written."""
    operations = range(history, history + max(1, seconds) * max(1, rate))
    watchers = [
        Watcher(f"client {number}", share * seconds)
        for number, share in enumerate(JOIN_TIMES, start=1)
    ]
    with (
        tempfile.TemporaryDirectory(prefix="datastreamer-") as folder,
        StreamServer(Path(folder) / "showcase.bin", host="127.0.0.1", port=0) as server,
    ):
        with server.stream.atomic_op():
            for number in range(history):
                add_operation(server.stream, number)
        try:
            with Screen(server.stream, watchers, rate) as screen:
                stop = operations.stop * ENTRIES_PER_OPERATION
                commits = write(server, watchers, screen, operations, rate, stop)
                for watcher in watchers:
                    watcher.finish()
                    screen.update()
        finally:
            for watcher in watchers:
                watcher.kill()
        written = digest_of(server.stream.batches())
        print_result(server.stream.total_entries, written, watchers, commits)
    differ = [watcher.name for watcher in watchers if watcher.report["digest"] != written]
    if differ:
        sys.exit(f"error: {' and '.join(differ)} did not receive what was written")


def print_result(
    entries: int, written: str, watchers: list[Watcher], commits: list[TimedCommit]
) -> None:
    """Print the table at the end, and commands to try next."""
    console = Console(width=None if sys.stdout.isatty() else 100, highlight=False)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("")
    for title in ("entries", "sha256", "catch-up", "p50", "p99"):
        table.add_column(title, justify="left" if title == "sha256" else "right")
    syncs = [(commit.returned - commit.called) / 1e6 for commit in commits]
    table.add_row("written", f"{entries:,}", written[:16], "", *quantiles(syncs))
    for watcher in watchers:
        digest = watcher.report["digest"]
        verdict = "[green]equal[/green]" if digest == written else "[red]differs[/red]"
        table.add_row(
            watcher.name,
            f"{watcher.report['entries']:,}",
            f"{digest[:16]} {verdict}",
            f"{watcher.catch_up_rate():,.0f} entries/s",
            *quantiles(watcher.latencies(commits)),
        )
    console.print()
    console.print(table)
    console.print(
        "catch-up: from joining to the head at that time, received, checked and hashed.\n"
        "p50, p99: from the call of commit to its return, when it is durable; to the receipt by "
        "a client."
    )
    program = Path(sys.executable).with_name("datastreamer")
    console.print("\n[bold]Next[/bold]")
    for words in (
        "demo demo.bin --ops 1000",
        "info demo.bin",
        "serve demo.bin             # and, in another terminal:",
        "cat localhost:6900 --follow",
    ):
        console.print(f"  {os.path.relpath(program)} {words}", soft_wrap=True)


def quantiles(milliseconds: list[float]) -> tuple[str, str]:
    """The median and the 99th percentile."""
    if not milliseconds:
        return "-", "-"
    ordered = sorted(milliseconds)
    middle, high = (ordered[int(share * len(ordered))] for share in (0.5, 0.99))
    return f"{middle:.2f} ms", f"{high:.2f} ms"


def main() -> None:
    parser = argparse.ArgumentParser(description="Show a stream server at work.")
    parser.add_argument("--seconds", type=int, default=12, help="duration of the writing [12]")
    parser.add_argument("--rate", type=int, default=50, help="operations per second [50]")
    parser.add_argument(
        "--history", type=int, default=40_000, help="operations written at the start [40000]"
    )
    parser.add_argument("--client", type=int, nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    try:
        if options.client:
            follow(*options.client)
        else:
            run(options.seconds, options.rate, options.history)
    except KeyboardInterrupt:
        sys.exit("error: interrupted")


if __name__ == "__main__":
    main()
