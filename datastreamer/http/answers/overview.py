"""What a person sees first: how the server is, what is not well, and the last hour.

Owns the samples of the last hour, and the words for what is not well and what to do about it.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from bisect import bisect_left
from collections import deque
from collections.abc import Iterator
from itertools import pairwise
from typing import Final, NamedTuple, TypedDict, cast

import trio

from datastreamer._version import __version__
from datastreamer.errors import DatastreamerError
from datastreamer.http.answers.monitoring import UpstreamStatus, one
from datastreamer.http.answers.reading import HttpSource
from datastreamer.http.port.messages import HttpAnswer, HttpProblem, HttpRequest, json_answer
from datastreamer.metrics.exposition import Histogram, MetricsSnapshot
from datastreamer.metrics.names import METRICS
from datastreamer.server.ticks import until_tick

SAMPLE_SECONDS: Final = 10
_KEPT: Final = 3600 // SAMPLE_SECONDS + 1
_COMMITS: Final = "datastreamer_commit_seconds"
_OF_ARCHIVE: Final = (
    *("entries", "lag_seconds", "lag_bytes", "generation", "term", "uploaded_bytes_total"),
    *("publications_total", "failures_in_a_row", "fenced", "diverged"),
    *("evicted_pages", "local_bytes", "retention_bytes"),
)
_EXPIRY_SECONDS: Final = 14 * 86400


class Ailment(TypedDict):
    """What is not well: `severity` is "bad" or "warn"."""

    severity: str
    text: str
    advice: str


class _TenSeconds(NamedTuple):
    time: float
    entries: int
    size: int
    clients: int
    lag: int | None
    commits: Histogram | None


class Overview:
    """Answers /v1/overview; `run` takes the samples."""

    def __init__(self, source: HttpSource) -> None:
        self._source = source
        self._path = os.path.abspath(source.path)
        self._samples: deque[_TenSeconds] = deque(maxlen=_KEPT)
        self._began = time.time()

    async def run(self) -> None:
        """Take samples until cancelled."""
        while True:
            # A parent that has ended, or a server without a stream, has none.
            with contextlib.suppress(trio.BrokenResourceError):
                self.add(await self._source.gather(limit=1))
            await until_tick(SAMPLE_SECONDS)

    def add(self, snapshot: MetricsSnapshot) -> None:
        """Keep a sample of the metrics, if they are those of a stream."""
        entries, size = one(snapshot, "head_entries"), one(snapshot, "head_bytes")
        if isinstance(entries, int) and isinstance(size, int):
            commits = one(snapshot, "commit_seconds")
            states = snapshot["samples"].get("datastreamer_clients", ())
            clients = sum(count for _, count in states if isinstance(count, int))
            lag = snapshot["clients"][0]["lag_entries"] if snapshot["clients"] else None
            known = cast("Histogram | None", commits)
            self._samples.append(_TenSeconds(snapshot["time"], entries, size, clients, lag, known))

    async def answer(self, request: HttpRequest) -> HttpAnswer:
        request.parameters()
        source = self._source
        snapshot = await source.gather(limit=0)
        server = source.server()
        upstreams = None if source.upstreams is None else source.upstreams()
        last: float | None = None
        if server is not None and (total := server.stream.total_entries):
            with contextlib.suppress(DatastreamerError, OSError):
                last = server.stream.time_of(total - 1)
        if last is not None:
            last /= 1000
        else:  # not known of an entry that another process has just committed
            grown = [b.time for a, b in pairwise(self._samples) if b.entries > a.entries]
            last = grown[-1] if grown else None
        found = {
            "name": socket.gethostname(),
            "path": self._path,
            "server_version": __version__,
            "role": "server" if upstreams is None else "relay",
            "time": round(snapshot["time"], 3),
            "uptime_seconds": int(time.time() - self._began),
            "last_commit": last,
            "problems": list(self._problems(snapshot, upstreams)),
            "upstreams": upstreams,
            "archive": _archive(snapshot),
            "sample_seconds": SAMPLE_SECONDS,
            "samples": [_between(*pair) for pair in pairwise(self._samples)],
        }
        return json_answer(found, [("Cache-Control", "no-store")])

    async def archive(self, request: HttpRequest) -> HttpAnswer:
        request.parameters()
        found = _archive(await self._source.gather(limit=0))
        if found is None:
            raise HttpProblem(404, "this server keeps no archive of the stream")
        return json_answer(found, [("Cache-Control", "no-store")])

    def _problems(
        self, snapshot: MetricsSnapshot, upstreams: list[UpstreamStatus] | None
    ) -> Iterator[Ailment]:
        """The worst ones first."""

        def number(name: str) -> float:
            value = one(snapshot, name)
            return value if isinstance(value, int | float) else 0

        unready = self._source.unready()
        if unready:
            yield _bad(
                f"Not ready: {unready}",
                "New clients should use another server until then; the log has more.",
            )
        if damaged := int(number("damaged_pages")):
            pages = "1 page is" if damaged == 1 else f"{damaged} pages are"
            yield _bad(
                f"{pages} damaged: readers of these entries get an error",
                "The log names them. Restart the server with `--heal HOST:PORT`, another server of "
                "the stream, or stop it and run `datastreamer repair FILE --from HOST:PORT`."
                if upstreams is None
                else "The log names them. The relay restores them from an upstream that has them.",
            )
        if number("archive_fenced") or number("archive_diverged"):
            yield _bad(
                "Nothing is archived or followed any more: the archive has another writer or other "
                "entries",
                "The log says which. `datastreamer archive list URL` shows what is there.",
            )
        elif number("archive_failures_in_a_row") > 1:
            yield _warn(
                f"The archive lags by {spell(number('archive_lag_seconds'))}: the last attempts "
                "failed",
                "The log has the reason; the stream is served and written without the archive.",
            )
        yield from _of_upstreams(upstreams or [])
        limit, used = number("clients_limit"), self._samples[-1].clients if self._samples else 0
        if limit and used >= limit:
            yield _warn(
                f"All {int(limit)} places for clients are taken: further ones are refused",
                "Raise --max-clients, or add a relay.",
            )
        expiry = number("tls_certificate_expiry_seconds")
        if expiry and (left := expiry - time.time()) < _EXPIRY_SECONDS:
            yield (_warn if left > 0 else _bad)(
                f"The TLS certificate {'expires in' if left > 0 else 'expired'} "
                f"{spell(abs(left))}{'' if left > 0 else ' ago'}",
                "Write the new certificate to its file and send the server SIGHUP.",
            )


def _archive(snapshot: MetricsSnapshot) -> dict[str, object] | None:
    """What the archiver counts; None without one."""
    found = {name: one(snapshot, f"archive_{name}") for name in _OF_ARCHIVE}
    return None if found["entries"] is None else found


def _of_upstreams(upstreams: list[UpstreamStatus]) -> Iterator[Ailment]:
    in_use = any(each["state"] == "in-use" for each in upstreams)
    if upstreams and not in_use:
        newest = min(each["seconds"] for each in upstreams)
        others = [each for each in upstreams if each["state"] != "set-aside"]
        reasons = "; ".join(each["reason"] for each in others if each["reason"])
        none = "none has answered yet" if others else "all are set aside"
        yield _bad(
            f"No upstream for {spell(newest)}: {reasons or none}",
            "The entries in the file are still served, and no new ones arrive. Check that an "
            "upstream runs and that this machine reaches it; the relay tries again by itself.",
        )
    for each in upstreams:
        name = each["upstream"]
        reason = each["reason"].removeprefix(f"{name} ")
        since = f"{name} has been %s for {spell(each['seconds'])}: {reason}"
        if each["state"] == "set-aside":
            yield _bad(
                since % "set aside",
                "The reason says why. The relay compares it every minute, and uses it again once "
                "it holds the relay's entries.",
            )
        elif each["state"] == "lost" and in_use:
            yield _warn(since % "lost", "Another upstream is in use; check this one.")


def _bad(text: str, advice: str) -> Ailment:
    return {"severity": "bad", "text": text, "advice": advice}


def _warn(text: str, advice: str) -> Ailment:
    return {"severity": "warn", "text": text, "advice": advice}


def spell(seconds: float) -> str:
    """A duration in its two largest units: 4 min 10 s."""
    units = (("d", 86400), ("h", 3600), ("min", 60), ("s", 1))
    whole = int(seconds)
    parts: list[str] = []
    for name, size in units:
        count, whole = divmod(whole, size)
        if count or parts or name == "s":
            parts.append(f"{count} {name}")
    return " ".join(part for part in parts[:2] if not part.startswith("0 ") or len(parts) == 1)


def _between(before: _TenSeconds, after: _TenSeconds) -> list[float | None]:
    """Time, entries and bytes a second, clients, the largest lag, and the 99th percentile of the
    commits in between, in seconds. A rate is null where the stream became shorter."""
    seconds = after.time - before.time
    ahead = after.entries - before.entries
    rates: list[float | None] = [None, None]
    if seconds > 0 and ahead >= 0:
        rates = [round(n / seconds, 2) for n in (ahead, max(0, after.size - before.size))]
    slow = None if before.commits is None else _slow(before.commits, after.commits)
    return [round(after.time), *rates, after.clients, after.lag, slow]


def _slow(before: Histogram, after: Histogram | None) -> float | None:
    """The upper bound of the bucket that the 99th percentile is in; None without commits."""
    if after is None:
        return None
    pairs = zip(before["buckets"], after["buckets"], strict=True)
    counts = [late - early for early, late in pairs]
    if counts[-1] <= 0:
        return None
    bounds = METRICS[_COMMITS].bounds
    return bounds[min(bisect_left(counts, 0.99 * counts[-1]), len(bounds) - 1)]
