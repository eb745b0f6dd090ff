"""How a benchmark reports: work, ours, rival or limit of the same run, ratio.

Owns the two fixtures that every benchmark uses, `versus` (times two callables in
turn) and `record` (takes figures that were measured in another way, latencies
say). Both put rows into pytest-benchmark's ``extra_info``; ``bench/table.py``
prints them. Knows nothing of what is measured.

A ratio is above 1 where ours is the better one, whatever the unit. In a smoke run
(``--benchmark-disable``) each callable runs once and nothing is judged; the
`smoke` fixture says so, for benchmarks that can do with less work then.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest

from bench.measure import Done
from tests.programs import missing

Work = Callable[[], object]
Rival = Work | float | None
Promise = float | Mapping[str, float] | None
Versus = Callable[..., None]
Record = Callable[..., None]


@pytest.fixture(scope="session")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The Go reference implementation (`bench.rivals.reference.Reference`), or None
    where go is missing: ``{"reference (Go)": reference and (lambda: ...)}``."""
    if missing("go"):
        return None
    from bench.rivals.reference import Reference

    return Reference(tmp_path_factory.mktemp("reference"))


@pytest.fixture
def smoke(request: pytest.FixtureRequest) -> bool:
    """True where nothing is measured: do a little of the work, once."""
    return bool(request.config.getoption("benchmark_disable"))


# A virtual machine that slept, or did other work, needs some tenths of a second to reach its
# speed: a server that sends 24 M entries/s right after another such run of 40 ms sends 12 M after
# a second's sleep or half a second of any other work.
_SOON_SECONDS = 0.3


def _timed(work: Work, amount: float, *, warm: bool = True) -> float:
    """Units per second of one call of `work`. With `warm`, a call shorter than `_SOON_SECONDS` is
    repeated and the second one counts, so that what ran before it has no influence."""
    begin = time.perf_counter()
    result = work()
    seconds = time.perf_counter() - begin
    if warm and seconds < _SOON_SECONDS:
        return _timed(work, amount, warm=False)
    if isinstance(result, Done):
        amount = amount if result.amount is None else result.amount
        seconds = seconds if result.seconds is None else result.seconds
    return amount / max(seconds, 1e-9)


class Rows:
    """The rows of one benchmark, in ``extra_info["rows"]``."""

    def __init__(self, benchmark: Any) -> None:
        self.benchmark = benchmark
        self.rows: list[dict[str, Any]] = benchmark.extra_info.setdefault("rows", [])
        self.measured = False

    def add(
        self,
        work: str,
        ours: float | None,
        rivals: Mapping[str, float | None],
        unit: str,
        at_least: Promise,
        less_is_better: bool,
    ) -> None:
        rivals = rivals or {"": None}
        if not isinstance(at_least, Mapping):
            at_least = {} if at_least is None else {next(iter(rivals)): at_least}
        for name, rival in rivals.items():
            ratio = None
            if ours and rival:
                ratio = rival / ours if less_is_better else ours / rival
            self.rows.append(
                {
                    "work": work,
                    "ours": ours,
                    "rival_name": name,
                    "rival": rival,
                    "unit": unit,
                    "ratio": ratio,
                    "at_least": at_least.get(name),
                }
            )


@pytest.fixture
def _rows(benchmark: Any) -> Iterator[Rows]:
    rows = Rows(benchmark)
    yield rows
    if rows.rows and not rows.measured:
        # The figures came from elsewhere; pytest-benchmark keeps no row without a run.
        benchmark.pedantic(lambda: None, rounds=1, iterations=1)


@pytest.fixture
def versus(_rows: Rows) -> Versus:
    """``versus(work, ours, rivals, *, unit, amount=1, rounds=5, at_least=None)``

    Calls `ours` and each of `rivals` in turn, `rounds` times after one call to
    warm up, and reports the medians in units a second. What takes less than some
    tenths of a second is called twice in its turn, and the second call counts.

    `work` names what is done ("append, one call an entry, 200 B"). `ours` is a
    callable without arguments. `rivals` maps a name ("struct oracle", "bare
    sendfile", "reference (Go)") to a callable that does the same work, to a rate
    measured before, or to None if the rival is not installed. `amount` is how
    many units one call does; a callable that knows better, or whose time is not
    the time of its call, returns `Done(amount, seconds)` (of `bench.measure`).
    `at_least` is the ratio that we promise to the first rival, or a mapping of
    rivals' names to ratios; the table marks a row that misses it. Once a benchmark.
    """

    def run(
        work: str,
        ours: Work,
        rivals: Mapping[str, Rival] | None = None,
        *,
        unit: str,
        amount: float = 1,
        rounds: int = 5,
        at_least: Promise = None,
    ) -> None:
        rivals = rivals or {}
        warm = not _rows.benchmark.disabled
        our_rates: list[float] = []
        rates: dict[str, list[float]] = {name: [] for name in rivals}

        def our_turn() -> None:
            our_rates.append(_timed(ours, amount, warm=warm))

        def rivals_turn() -> None:
            for name, rival in rivals.items():
                if callable(rival):
                    rates[name].append(_timed(rival, amount, warm=warm))
                elif rival is not None:
                    rates[name].append(rival)

        rivals_turn()
        if not _rows.benchmark.disabled:
            our_turn()
            our_rates.clear()
            for found in rates.values():
                found.clear()
        _rows.measured = True
        # The rivals run as the set-up of each round of ours: a machine that drifts
        # drifts for both.
        _rows.benchmark.pedantic(our_turn, setup=rivals_turn, rounds=rounds, iterations=1)
        _rows.add(
            work,
            statistics.median(our_rates),
            {n: statistics.median(found) if found else None for n, found in rates.items()},
            unit,
            at_least,
            less_is_better=False,
        )

    return run


@pytest.fixture
def record(_rows: Rows) -> Record:
    """``record(work, ours, rivals, *, unit, at_least=None, less_is_better=True)``

    Reports figures that the benchmark measured itself: `ours` a number, `rivals`
    a mapping of names to numbers (None if the rival is not installed). May be
    called several times, one row or more each (p50, p99, the longest).
    """

    def run(
        work: str,
        ours: float | None,
        rivals: Mapping[str, float | None] | None = None,
        *,
        unit: str,
        at_least: Promise = None,
        less_is_better: bool = True,
    ) -> None:
        _rows.add(work, ours, rivals or {}, unit, at_least, less_is_better)

    return run
