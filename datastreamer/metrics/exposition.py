"""Samples: of one process, of several together, and as the text that Prometheus reads.

Samples are plain values, as JSON has them, so that processes can hand them to each other. The
text is made by prometheus-client, which is loaded for that alone.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from heapq import nlargest
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Final, TypedDict, cast

from datastreamer.metrics.names import METRICS, Metric, Together

if TYPE_CHECKING:
    from prometheus_client.core import Metric as Family


class Histogram(TypedDict):
    """`buckets`: how many are up to each bound, and up to infinity."""

    buckets: list[int]
    sum: float


Value = int | float | Histogram
# The labels' values, in the order of the metric's labels, and the sample; by metric.
Sampled = list[tuple[list[str], Value]]
Samples = dict[str, Sampled]


class ConnectedClient(TypedDict):
    """One client that is connected. `id` is no other's, in whichever process. `entry` is the
    next it is sent, `offset` where in the file; the lags are None where it does not stream, that
    in bytes also until its place is found."""

    id: str
    client: str
    state: str
    seconds: float
    entry: int | None
    offset: int | None
    lag_entries: int | None
    lag_bytes: int | None


class MetricsSnapshot(TypedDict):
    """What one process tells at `time` (Unix time), or several together."""

    time: float
    samples: Samples
    clients: list[ConnectedClient]


TEXT: Final = "text/plain; version=0.0.4; charset=utf-8"
# So many clients have series of their own, those furthest behind.
LISTED: Final = 20


class Tally:
    """A histogram that is being counted; its bounds are those of the metric `name`."""

    def __init__(self, name: str) -> None:
        self._bounds = METRICS[name].bounds
        self._counts = [0] * (len(self._bounds) + 1)
        self._sum = 0.0

    def add(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def histogram(self) -> Histogram:
        return {"buckets": list(accumulate(self._counts)), "sum": self._sum}


def merge(parts: Sequence[MetricsSnapshot], limit: int = LISTED) -> MetricsSnapshot:
    """What several processes that serve one stream tell, as if they were one; the `limit`
    clients furthest behind."""
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
        "clients": furthest_behind((c for part in parts for c in part["clients"]), limit),
    }


def furthest_behind(clients: Iterable[ConnectedClient], limit: int) -> list[ConnectedClient]:
    """The `limit` clients with the most to be sent, the furthest behind first; those that do
    not stream come last."""
    return nlargest(limit, clients, key=_behind)


def _behind(client: ConnectedClient) -> tuple[int, int]:
    entries, size = client["lag_entries"], client["lag_bytes"]
    return -1 if entries is None else entries, size or 0


def _sum(one: float, other: float) -> float:
    return one + other


_COMBINED: Final[dict[Together, Callable[..., Any]]] = {"sum": _sum, "max": max, "min": min}


def _together(metric: Metric, one: Value, other: Value) -> Value:
    combine = _COMBINED[metric.together]
    if isinstance(one, dict) and isinstance(other, dict):
        pairs = zip(one["buckets"], other["buckets"], strict=True)
        return {
            "buckets": [combine(a, b) for a, b in pairs],
            "sum": combine(one["sum"], other["sum"]),
        }
    return cast("float", combine(one, other))


def prepare() -> None:
    """Load what makes the text, which takes some 25 ms, before there is something to disturb.

    Raises `ImportError` where prometheus-client is not installed.
    """
    import prometheus_client  # noqa: F401


def exposed(snapshot: MetricsSnapshot) -> Iterator[bytes]:
    """The text, a metric at a time, so that others can have a turn between two.

    Raises `ImportError` where prometheus-client is not installed.
    """
    from prometheus_client import generate_latest

    samples = {**snapshot["samples"], **_of_clients(snapshot["clients"])}
    for name, metric in METRICS.items():
        if name in samples:
            yield generate_latest(_One(_family(name, metric, samples[name])))


def expose(snapshot: MetricsSnapshot) -> bytes:
    """The text as one."""
    return b"".join(exposed(snapshot))


def _of_clients(clients: Sequence[ConnectedClient]) -> Samples:
    """The series of single clients: a bounded number of them, one for a name."""
    entries: dict[str, Value] = {}
    size: dict[str, Value] = {}
    for client in clients[:LISTED]:
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


class _One:
    """As much of a registry as `generate_latest` asks for."""

    def __init__(self, family: Family) -> None:
        self._family = family

    def collect(self) -> Iterator[Family]:
        yield self._family


def _shown(bound: float) -> str:
    """A bucket's bound, exactly."""
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
