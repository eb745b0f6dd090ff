"""Samples of one process, merged over several, and in the text format of Prometheus.

Samples are plain JSON values, so that processes can exchange them. prometheus-client, loaded
only for that, makes the text.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from heapq import nlargest
from itertools import accumulate
from operator import add
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Final, TypedDict, cast

from datastreamer.metrics.names import METRICS, Metric, Together

if TYPE_CHECKING:
    from prometheus_client.core import Metric as Family


class Histogram(TypedDict):
    """`buckets`: the number of values up to each bound, and up to infinity."""

    buckets: list[int]
    sum: float


Value = int | float | Histogram
# By metric: the values of the labels, in the order of the metric's labels, and the sample.
Sampled = list[tuple[list[str], Value]]
Samples = dict[str, Sampled]


class ConnectedClient(TypedDict):
    """A connected client. `id` is unique over all processes. `entry` is the next entry to send,
    `offset` its place in the file; the lags are None if the client does not stream, the lag in
    bytes also until that place is known."""

    id: str
    client: str
    state: str
    seconds: float
    entry: int | None
    offset: int | None
    lag_entries: int | None
    lag_bytes: int | None


class MetricsSnapshot(TypedDict):
    """The metrics of one process, or of several merged, at `time` (Unix time)."""

    time: float
    samples: Samples
    clients: list[ConnectedClient]


TEXT: Final = "text/plain; version=0.0.4; charset=utf-8"
# Number of clients with series of their own, those with the largest lag.
LISTED_CLIENTS: Final = 20


class Tally:
    """Counts values into the buckets of the metric `name`."""

    def __init__(self, name: str) -> None:
        self._bounds = METRICS[name].bounds
        self._counts = [0] * (len(self._bounds) + 1)
        self._sum = 0.0

    def add(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def histogram(self) -> Histogram:
        return {"buckets": list(accumulate(self._counts)), "sum": self._sum}


def merge(parts: Sequence[MetricsSnapshot], limit: int = LISTED_CLIENTS) -> MetricsSnapshot:
    """Combine the metrics of processes that serve one stream, with the `limit` clients of the
    largest lag."""
    merged: Samples = {}
    for name, metric in METRICS.items():
        found: dict[tuple[str, ...], Value] = {}
        for part in parts:
            for labels, value in part["samples"].get(name, ()):
                key = tuple(labels)
                before = found.get(key)
                found[key] = value if before is None else _together(metric, before, value)
        if found:
            merged[name] = [(list(labels), value) for labels, value in found.items()]
    return {
        "time": max(part["time"] for part in parts),
        "samples": merged,
        "clients": largest_lags((c for part in parts for c in part["clients"]), limit),
    }


def largest_lags(clients: Iterable[ConnectedClient], limit: int) -> list[ConnectedClient]:
    """The `limit` clients with the largest lag, in that order; those that do not stream come
    last."""
    return nlargest(limit, clients, key=_lag)


def _lag(client: ConnectedClient) -> tuple[int, int]:
    entries, size = client["lag_entries"], client["lag_bytes"]
    return -1 if entries is None else entries, size or 0


_COMBINED: Final[dict[Together, Callable[..., Any]]] = {"sum": add, "max": max, "min": min}


def _together(metric: Metric, one: Value, other: Value) -> Value:
    combine = _COMBINED[metric.together]
    if isinstance(one, dict) and isinstance(other, dict):
        pairs = zip(one["buckets"], other["buckets"], strict=True)
        return {
            "buckets": [combine(a, b) for a, b in pairs],
            "sum": combine(one["sum"], other["sum"]),
        }
    return cast("float", combine(one, other))


def process_samples() -> Samples:
    """The process's use of memory, CPU and descriptors: no samples on other systems than Linux,
    and without prometheus-client."""
    try:
        from prometheus_client import ProcessCollector
    except ImportError:
        return {}
    return {
        sample.name: [([], sample.value)]
        for family in ProcessCollector(registry=None).collect()
        for sample in family.samples
    }


def load_exporter() -> None:
    """Import prometheus-client, which takes 25 ms, while no client is connected.

    Raises `ImportError` if it is not installed.
    """
    import prometheus_client  # noqa: F401


def exposition_parts(snapshot: MetricsSnapshot) -> Iterator[bytes]:
    """The text, one metric at a time, so that the event loop can run other tasks in between.

    Raises `ImportError` if prometheus-client is not installed.
    """
    from prometheus_client import generate_latest

    samples = {**snapshot["samples"], **_of_clients(snapshot["clients"])}
    for name, metric in METRICS.items():
        if name in samples:
            family = _family(name, metric, samples[name])
            # The part of a registry that is used.
            yield generate_latest(cast("Any", SimpleNamespace(collect=[family].copy)))


def _of_clients(clients: Sequence[ConnectedClient]) -> Samples:
    """The series of single clients: a bounded number, one for each client name."""
    entries: dict[str, Value] = {}
    size: dict[str, Value] = {}
    for client in clients[:LISTED_CLIENTS]:
        if client["lag_entries"] is not None:
            entries.setdefault(client["client"], client["lag_entries"])
        if client["lag_bytes"] is not None:
            size.setdefault(client["client"], client["lag_bytes"])
    named = {"datastreamer_client_lag_entries": entries, "datastreamer_client_lag_bytes": size}
    return {
        name: [([client], value) for client, value in values.items()]
        for name, values in named.items()
        if values
    }


def _shown(bound: float) -> str:
    """The bound of a bucket, exactly."""
    text = f"{bound:g}"
    return text if float(text) == bound else repr(bound)


def _family(name: str, metric: Metric, samples: Sequence[tuple[Sequence[str], Value]]) -> Family:
    from prometheus_client import core

    kinds = {
        "counter": core.CounterMetricFamily,
        "gauge": core.GaugeMetricFamily,
        "histogram": core.HistogramMetricFamily,
        "gaugehistogram": core.GaugeHistogramMetricFamily,
    }
    family = kinds[metric.kind](name, metric.help, labels=metric.labels)
    for labels, value in samples:
        if isinstance(value, dict):
            bounds = [*(_shown(bound) for bound in metric.bounds), "+Inf"]
            buckets = list(zip(bounds, value["buckets"], strict=True))
            family.add_metric(labels, buckets, value["sum"])
        else:
            family.add_metric(labels, value)
    return cast("Family", family)
