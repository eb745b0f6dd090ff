"""The status of a relay and its upstreams: metrics and readiness.

Owns the labels of samples and the limit of the lag. Changes nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Protocol

from datastreamer.client.upstream import Upstream
from datastreamer.errors import DatastreamerError
from datastreamer.metrics.block import WriterNumbers
from datastreamer.metrics.exposition import LISTED_CLIENTS, MetricsSnapshot, Samples
from datastreamer.server.metrics import collect, of_process
from datastreamer.server.server import Server
from datastreamer.storage.stream import DataStream

READY_LAG: Final = 10_000
"""Default number of entries that a ready relay may lack."""

STATES: Final = ("in-use", "spare", "lost", "set-aside")


class UpstreamView(Protocol):
    """One upstream of a relay, as its status reads it."""

    @property
    def upstream(self) -> Upstream: ...

    @property
    def entries(self) -> int | None: ...

    @property
    def set_aside(self) -> DatastreamerError | None: ...

    @property
    def lost(self) -> str: ...


class RelayState(Protocol):
    """A relay, as its status reads it."""

    @property
    def states(self) -> Sequence[UpstreamView]: ...

    @property
    def current(self) -> UpstreamView | None: ...

    @property
    def stream(self) -> DataStream | None: ...

    @property
    def server(self) -> Server | None: ...

    @property
    def numbers(self) -> WriterNumbers | None: ...

    @property
    def failure(self) -> DatastreamerError | None: ...

    @property
    def updates(self) -> int: ...

    @property
    def uncompared(self) -> int: ...


def state_of(relay: RelayState, state: UpstreamView) -> str:
    """The state of an upstream: one of `STATES`."""
    if state.set_aside is not None:
        return "set-aside"
    if state is relay.current:
        return "in-use"
    return "lost" if state.lost else "spare"


def lag_behind(relay: RelayState, state: UpstreamView) -> int | None:
    """The number of entries that the upstream holds and the relay lacks; None: not known."""
    if state.entries is None:
        return None
    here = 0 if relay.stream is None else relay.stream.total_entries
    return max(0, state.entries - here)


def unready(relay: RelayState, bound: int) -> str:
    """The reason why clients should use another server; empty if they are served and no usable
    upstream is known to hold over `bound` entries more.

    A lost upstream does not make a relay unready: the entries here are served.
    """
    if relay.server is None:
        return "no upstream has answered yet, so the stream is not known"
    if why := relay.server.unready:
        return why
    if relay.failure is not None:
        return f"the download has stopped: {relay.failure}"
    states = [state for state in relay.states if state.set_aside is None]
    lags = [(lag, state) for state in states if (lag := lag_behind(relay, state)) is not None]
    if not lags:
        return "no upstream has reported its head yet"
    if relay.current is not None:
        lags = [(lag, state) for lag, state in lags if state is relay.current] or lags
    lag, state = max(lags, key=lambda pair: pair[0])
    if lag > bound:
        return f"{lag} entries behind {state.upstream.name}; at most {bound} are allowed"
    return ""


async def gather(relay: RelayState, limit: int = LISTED_CLIENTS) -> MetricsSnapshot:
    """As `collect` of the relay's server, with the upstreams' metrics; only the latter while there
    is no server."""
    if relay.server is None:
        snapshot = of_process()
    else:
        snapshot = await collect(relay.server, relay.numbers, limit)
    snapshot["samples"].update(_samples(relay))
    return snapshot


def _samples(relay: RelayState) -> Samples:
    found: Samples = {
        "datastreamer_relay_upstream_state": [
            ([state.upstream.name, name], int(state_of(relay, state) == name))
            for state in relay.states
            for name in STATES
        ],
        "datastreamer_relay_updates_total": [([], relay.updates)],
        "datastreamer_relay_uncompared_entries": [([], relay.uncompared)],
    }
    known = [(state.upstream.name, lag_behind(relay, state)) for state in relay.states]
    lags = {name: lag for name, lag in known if lag is not None}
    if lags:
        found["datastreamer_relay_lag_entries"] = [([name], lag) for name, lag in lags.items()]
    return found
