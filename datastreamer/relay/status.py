"""The status of a relay and its upstreams: metrics and readiness.

Owns the labels of samples and the limit of the lag. Changes nothing.
"""

from __future__ import annotations

import time
from typing import Final

from datastreamer.http.answers.monitoring import UpstreamStatus
from datastreamer.metrics.exposition import MetricsSnapshot, Samples
from datastreamer.metrics.writer_numbers import WriterNumbers
from datastreamer.printable import counted
from datastreamer.relay.upstream_state import STATES
from datastreamer.relay.upstreams import Download
from datastreamer.server.metrics import collect, of_process
from datastreamer.server.server import Server

READY_LAG: Final = 10_000
"""Default number of entries that a ready relay may lack."""


def upstreams(download: Download) -> list[UpstreamStatus]:
    """The upstreams, for people."""
    for state in download.states:
        state.note(download.current)
    now = time.time()
    return [
        {
            "upstream": state.upstream.name,
            "state": state.shown,
            "lag_entries": download.lag_behind(state),
            "seconds": round(max(0.0, now - state.since), 3),
            "reason": str(state.set_aside or state.lost),
        }
        for state in download.states
    ]


def unready(download: Download, server: Server | None, bound: int) -> str:
    """The reason why clients should use another server; empty if they are served and no usable
    upstream is known to hold over `bound` entries more.

    A lost upstream does not make a relay unready: the entries here are served.
    """
    if server is None:
        return "no upstream has answered yet, so the stream is not known"
    if why := server.unready:
        return why
    if download.failure is not None:
        return f"the download has stopped: {download.failure}"
    states = [state for state in download.states if state.set_aside is None]
    lags = [(lag, state) for state in states if (lag := download.lag_behind(state)) is not None]
    if not lags:
        return "no upstream has reported its head yet"
    if download.current is not None:
        lags = [(lag, state) for lag, state in lags if state is download.current] or lags
    lag, state = max(lags, key=lambda pair: pair[0])
    if lag > bound:
        return f"{counted(lag)} behind {state.upstream.name}; at most {bound} are allowed"
    return ""


async def gather(
    download: Download, server: Server | None, numbers: WriterNumbers | None, limit: int
) -> MetricsSnapshot:
    """As `collect` of the relay's server, with the upstreams' metrics; only the latter while no
    server runs."""
    if server is None:
        snapshot = of_process()
    else:
        snapshot = await collect(server, numbers, limit)
    snapshot["samples"].update(_samples(download))
    return snapshot


def _samples(download: Download) -> Samples:
    found: Samples = {
        "datastreamer_relay_upstream_state": [
            ([state.upstream.name, name], int(state.beside(download.current) == name))
            for state in download.states
            for name in STATES
        ],
        "datastreamer_relay_updates_total": [([], download.updates)],
        "datastreamer_relay_uncompared_entries": [([], download.uncompared)],
        "datastreamer_relay_damaged_total": [
            ([state.upstream.name], state.damaged) for state in download.states
        ],
    }
    known = [(state.upstream.name, download.lag_behind(state)) for state in download.states]
    lags = {name: lag for name, lag in known if lag is not None}
    if lags:
        found["datastreamer_relay_lag_entries"] = [([name], lag) for name, lag in lags.items()]
    return found
