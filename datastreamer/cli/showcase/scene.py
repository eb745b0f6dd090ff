"""What is seen of the showcase: live while it plays, and the table at its end.

On a terminal a picture that is drawn anew; elsewhere a line a second.
"""

from __future__ import annotations

import os
import sys
import time
from typing import Protocol

from rich import box
from rich.console import Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from datastreamer.cli.demo.sequencer import Sequencer
from datastreamer.cli.shared.console import new_console
from datastreamer.cli.showcase.audience import Commit, Watcher
from datastreamer.storage.stream import DataStream

_FRAME_SECONDS = 0.1
_LINE_SECONDS = 1.0
_DIGEST_SHOWN = 16


class Scene(Protocol):
    """A context manager; `show` is called often."""

    def __enter__(self) -> Scene: ...
    def __exit__(self, *_: object) -> None: ...

    def show(self) -> None:
        """Show how it stands, if it is time to."""


def new_scene(
    stream: DataStream, sequencer: Sequencer, clients: list[Watcher], blocks: int, rate: int
) -> Scene:
    """The scene that suits standard output."""
    state = _State(stream, sequencer, clients, blocks, rate)
    return _Picture(state) if sys.stdout.isatty() else _Lines(state)


class _State:
    """What there is to be seen."""

    def __init__(
        self,
        stream: DataStream,
        sequencer: Sequencer,
        clients: list[Watcher],
        blocks: int,
        rate: int,
    ) -> None:
        self.stream = stream
        self.sequencer = sequencer
        self.clients = clients
        self.rate = rate
        self.last_block = sequencer.block + blocks - 1
        self.began = time.monotonic()

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.began

    def doing(self, client: Watcher) -> str:
        if client.state == "waiting":
            return f"joins at {client.joins:.0f} s"
        if client.state == "done":
            return "has all"
        # A report comes a few times a second: one that is a moment old is no lag.
        near = self.stream.total_entries - 5 * max(1, self.rate)
        return "live" if client.entries >= near else "catching up"


class _Lines:
    def __init__(self, state: _State) -> None:
        self._state = state
        self._due = 0.0

    def __enter__(self) -> _Lines:
        state = self._state
        print(f"the stream holds {state.stream.total_entries:,} entries; more are written now")
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def show(self) -> None:
        state = self._state
        if state.seconds < self._due:
            return
        self._due = state.seconds + _LINE_SECONDS
        clients = ", ".join(
            f"{client.name} {state.doing(client)}"
            + (f" ({client.entries:,})" if client.entries else "")
            for client in state.clients
        )
        print(
            f"{state.seconds:4.0f} s  block {state.sequencer.block - 1:,}, "
            f"entries {state.stream.total_entries:,}; {clients}",
            flush=True,
        )


class _Picture:
    def __init__(self, state: _State) -> None:
        self._state = state
        self._due = 0.0
        self._live = Live(self._draw(), auto_refresh=False, console=new_console(sys.stdout))

    def __enter__(self) -> _Picture:
        self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.update(self._draw(), refresh=True)
        self._live.stop()

    def show(self) -> None:
        if self._state.seconds >= self._due:
            self._due = self._state.seconds + _FRAME_SECONDS
            self._live.update(self._draw(), refresh=True)

    def _draw(self) -> Group:
        state = self._state
        total = state.stream.total_entries
        rows = Table.grid(padding=(0, 2))
        rows.add_column(min_width=9)
        rows.add_column(width=30)
        rows.add_column(justify="right", min_width=9)
        rows.add_column(min_width=12)
        rows.add_row(
            "sequencer",
            Text(f"block {state.sequencer.block - 1:,} of {state.last_block:,}", "green"),
            f"{total:,}",
            "entries committed",
        )
        for client in state.clients:
            bar = ProgressBar(total=max(1, total), completed=client.entries, width=30)
            rows.add_row(client.name, bar, f"{client.entries:,}", state.doing(client))
        title = Text(
            f"One process writes {state.rate} blocks a second, one serves, three follow "
            f"from entry 0.  {state.seconds:4.1f} s",
            "bold",
        )
        return Group(title, Text(), rows)


def print_result(entries: int, digest: str, clients: list[Watcher], commits: list[Commit]) -> None:
    """The table at the end, and what to try next."""
    width = None if sys.stdout.isatty() else 100
    console = new_console(sys.stdout, width=width, markup=True)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("")
    for title in ("entries", "sha256", "catch-up", "p50", "p99"):
        table.add_column(title, justify="left" if title == "sha256" else "right")
    syncs = [(commit.returned - commit.called) / 1e6 for commit in commits]
    table.add_row("written", f"{entries:,}", digest[:_DIGEST_SHOWN], "", *_quantiles(syncs))
    for client in clients:
        report = client.report
        same = report["digest"] == digest
        verdict = "[green]equal[/green]" if same else "[red]differs[/red]"
        table.add_row(
            client.name,
            f"{report['entries']:,}",
            f"{report['digest'][:_DIGEST_SHOWN]} {verdict}",
            f"{client.catch_up_rate:,.0f} entries/s",
            *_quantiles(client.latencies(commits)),
        )
    console.print()
    console.print(table)
    console.print(
        "catch-up: from joining to the last entry there was then, received, checked, hashed.\n"
        "p50, p99: from the call of commit to its return, when it is on disk; to the receipt "
        "by a client."
    )
    program = _program()
    console.print("\n[bold]Next[/bold]")
    for command in (
        f"{program} demo demo.bin --ops 1000",
        f"{program} info demo.bin",
        f"{program} serve demo.bin             # and, in another terminal:",
        f"{program} cat localhost:6900 --follow",
    ):
        console.print(f"  {command}", soft_wrap=True)


def _quantiles(milliseconds: list[float]) -> tuple[str, str]:
    """The median and the 99th percentile, for people."""
    if not milliseconds:
        return "-", "-"
    ordered = sorted(milliseconds)
    middle, high = (ordered[int(part * len(ordered))] for part in (0.5, 0.99))
    return f"{middle:.2f} ms", f"{high:.2f} ms"


def _program() -> str:
    """How the user calls the operator's tool from here."""
    script = os.path.join(os.path.dirname(sys.executable), "datastreamer")
    if not os.path.exists(script):
        return f"{os.path.relpath(sys.executable)} -m datastreamer"
    near = os.path.relpath(script)
    return script if near.startswith("..") else near
