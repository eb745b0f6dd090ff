"""HTTP: ranges, live latency by Server-Sent Events, and what followers and consoles cost others.

The limit of each row is what the same server does over TCP.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest

from bench.bench_serving import SIZE, fill, live
from bench.http_readers import Beside, SseReaders, read_range
from bench.measure import Latencies
from bench.readers import catch_up
from datastreamer import HttpOptions, StreamServer

# The most that an event may take more than an entry over TCP.
SSE_MS = 0.4


@contextmanager
def serving(path: Path, **options: Any) -> Iterator[tuple[StreamServer, tuple[str, int]]]:
    """A server, and the address of its HTTP port."""
    with StreamServer(
        path, host="127.0.0.1", port=0, sync="os", http=HttpOptions(port=0), **options
    ) as server:
        assert server.http_port is not None
        yield server, ("127.0.0.1", server.http_port)


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Any:
    """The number of 200 B entries of a stream (217 MB; a smoke run's is small), and its server."""
    entries = 2_000 if request.config.getoption("benchmark_disable") else 1_000_000
    path = tmp_path_factory.mktemp("stored") / "stream.bin"
    fill(path, entries)
    with serving(path, index="memory") as (server, address):
        yield entries, server.addresses[0], address


def test_raw_range(versus: Any, stored: Any) -> None:
    entries, tcp, http = stored
    versus(
        "range over HTTP, raw, 200 B",
        lambda: read_range(http, "/v1/entries?format=raw", entries, entries * (17 + SIZE)),
        {"catch-up over TCP": lambda: catch_up(tcp, entries=entries, size=SIZE)},
        unit="entries/s",
        at_least=0.8,
    )


@pytest.mark.parametrize(
    ("form", "at_least"), [("ndjson", 1.0), ("arrow", None)], ids=["ndjson", "arrow"]
)
def test_range(versus: Any, stored: Any, form: str, at_least: float | None) -> None:
    entries, _, http = stored
    versus(
        f"range over HTTP, {form}, 200 B",
        lambda: read_range(http, f"/v1/entries?format={form}", entries, entries * SIZE),
        {"1,000,000 a second": 1e6},
        unit="entries/s",
        at_least=at_least,
    )


@pytest.mark.parametrize("clients", [1, 10], ids="{}clients".format)
def test_events(record: Any, smoke: bool, tmp_path: Path, clients: int) -> None:
    """From just before a commit of 5 entries to receipt, in turn with TCP."""
    operations = 5 if smoke else 300
    found: dict[str, list[Latencies]] = {"events": [], "tcp": []}
    with serving(tmp_path / "live.bin") as (server, http):
        for _ in range(1 if smoke else 5):
            found["tcp"].append(live(server, clients, operations, 100))
            found["events"].append(
                live(server, clients, operations, 100, readers=SseReaders, address=http)
            )
    for name in ("p50", "p99"):
        events, tcp = (median(each, name) for each in found.values())
        allowed = {f"over TCP + {SSE_MS} ms": tcp + SSE_MS, "over TCP": tcp}
        record(
            f"live by Server-Sent Events, {clients} clients, 100 op/s of 5, {name}",
            events,
            allowed,
            unit="ms",
            at_least=1.0 if name == "p50" and clients == 1 else None,
        )


@pytest.mark.parametrize(
    "beside",
    [{"followers": 200}, {"consoles": 20}],
    ids=lambda beside: "{1}{0}".format(*next(iter(beside.items()))),
)
def test_beside(record: Any, smoke: bool, tmp_path: Path, beside: dict[str, int]) -> None:
    """TCP clients beside clients over HTTP, in turn with the same without those."""
    [(kind, count)] = beside.items()
    operations = 5 if smoke else 400
    found: dict[bool, list[Latencies]] = {True: [], False: []}
    with serving(tmp_path / "live.bin") as (server, http):
        for _ in range(1 if smoke else 7):
            for present, rounds in found.items():
                others: AbstractContextManager[object] = nullcontext()
                if present:
                    others = Beside(http, **{kind: 2 if smoke else count})
                with others:
                    rounds.append(live(server, 10, operations, 100))
    for name in ("p50", "p99"):
        present, absent = (median(each, name) for each in found.values())
        record(
            f"live over TCP, 10 clients, beside {count} {kind}, 100 op/s of 5, {name}",
            present,
            {"without those": absent},
            unit="ms",
            at_least=0.9 if name == "p99" else None,
        )


def median(found: Sequence[Latencies], name: str) -> float:
    return statistics.median(getattr(one, name) for one in found)
