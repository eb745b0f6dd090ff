"""The benchmarks' own arithmetic: a claim of speed is only as good as its ratio."""

from __future__ import annotations

import io
import json
import socket
import threading
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from bench.conftest import Rows
from bench.measure import Latencies
from bench.readers import LiveReaders, catch_up, point_reads
from bench.table import figure, missed, rows_of, table_of


def run(**given: Any) -> dict[str, Any]:
    found = Rows(SimpleNamespace(extra_info={}))
    row = {"unit": "entries/s", "at_least": None, "less_is_better": False, **given}
    found.add(row.pop("work", "work"), row.pop("ours"), row.pop("rivals"), **row)
    # What the table is made of has been through JSON.
    made = {"benchmarks": [{"extra_info": found.benchmark.extra_info}, {"extra_info": {}}]}
    again: dict[str, Any] = json.loads(json.dumps(made))
    return again


def rows(**given: Any) -> list[dict[str, Any]]:
    return rows_of([run(**given)])


def test_a_row_that_several_runs_have_has_the_medians() -> None:
    runs = [run(ours=ours, rivals={"a": rival}) for ours, rival in [(9, 1), (4, 2), (6, 4)]]
    runs.append(run(ours=3, rivals={"b": None}))
    ours, theirs = rows_of(runs)
    assert (ours["ours"], ours["rival"], ours["ratio"]) == (6, 2, 2)
    assert (theirs["ours"], theirs["rival"], theirs["ratio"]) == (3, None, None)


@pytest.mark.parametrize(
    "ours, rival, less_is_better, ratio",
    [(200.0, 100.0, False, 2.0), (200.0, 100.0, True, 0.5), (None, 100.0, False, None)],
)
def test_ratio_above_one_is_better(
    ours: float | None, rival: float, less_is_better: bool, ratio: float | None
) -> None:
    (row,) = rows(ours=ours, rivals={"rival": rival}, less_is_better=less_is_better)
    assert row["ratio"] == ratio


def test_promise_is_to_the_first_rival_or_by_name() -> None:
    rivals = {"limit": 100.0, "rival": 10.0, "absent": None}
    first = rows(ours=70.0, rivals=rivals, at_least=0.8)
    assert [missed(row) for row in first] == [True, False, False]
    named = rows(ours=70.0, rivals=rivals, at_least={"rival": 8, "absent": 1})
    assert [missed(row) for row in named] == [False, True, False]


@pytest.mark.parametrize(
    "value, text",
    [
        (14_231_000.0, "14.2 M"),
        (448_100.0, "448 k"),
        (9_871_000_000.0, "9.87 G"),
        (193.4, "193"),
        (0.1249, "0.125"),
        (None, "-"),
    ],
)
def test_figures_have_three_digits(value: float | None, text: str) -> None:
    assert figure(value) == text


def test_table_names_what_is_not_here() -> None:
    out = io.StringIO()
    made = rows(work="append", ours=5e6, rivals={"limit": 1e7, "Go": None}, at_least=0.4)
    Console(file=out, width=120).print(table_of(made))
    assert "append" in out.getvalue()
    assert "0.500 x" in out.getvalue()
    assert "Go (not here)" in out.getvalue()


def test_latencies_in_milliseconds() -> None:
    waits = [n / 1000 for n in range(101)]
    assert Latencies.of(waits[::-1]) == (50.0, 99.0, 100.0, 101)


@pytest.fixture
def rude_server() -> Any:
    """Answers nothing and hangs up."""

    def hang_up() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            connection.close()

    listener = socket.create_server(("127.0.0.1", 0))
    thread = threading.Thread(target=hang_up)
    thread.start()
    yield listener.getsockname()
    listener.shutdown(socket.SHUT_RDWR)
    listener.close()
    thread.join()


def test_readers_give_up_on_a_server_that_hangs_up(rude_server: tuple[str, int]) -> None:
    with pytest.raises(ConnectionError):
        catch_up(rude_server, entries=1, size=8)
    with pytest.raises(ConnectionError):
        point_reads(rude_server, [0], size=8)
    with pytest.raises(ConnectionError, match="the readers gave up"):
        LiveReaders(rude_server, clients=2, operations=1, start=0).__enter__()
