"""A relay: downloads a stream, stores it in a file and serves it.

Owns the choice among upstreams, and what follows if one is lost, shorter or rewritten.
`upstream.py` compares the file with an upstream, `writer.py` writes it.
"""

from __future__ import annotations

import logging
import math
import os
import random
import socket
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final, Literal

import trio

from datastreamer.client.async_client import Client
from datastreamer.client.upstream import Upstream
from datastreamer.errors import (
    ConnectionLost,
    DatastreamerError,
    FileMissing,
    NoAnswer,
    PeerError,
    UpstreamMismatch,
    UpstreamRewritten,
    UpstreamShorter,
    UsageError,
)
from datastreamer.format import STREAM_TYPE_SEQUENCER, Header
from datastreamer.metrics.block import WriterNumbers
from datastreamer.protocol import flows as exchanges
from datastreamer.protocol.arguments import check_number
from datastreamer.protocol.retry import BACKOFF, Backoff, check_seconds, check_waits
from datastreamer.relay.apply_changes import (
    ChangeApplier,
    keep_over_truncation,
    known_agreement,
)
from datastreamer.relay.compare import Comparison
from datastreamer.relay.status import READY_LAG, gather, lag_behind, unready
from datastreamer.relay.truncation_point import truncation_point
from datastreamer.relay.upstream import (
    Joined,
    client_of,
    common_entries,
    header_of,
    join,
)
from datastreamer.relay.writer import RelayWriter
from datastreamer.server.limits import Limits
from datastreamer.server.metrics_http import serve_metrics
from datastreamer.server.publish.policy import check_client_tokens
from datastreamer.server.server import Server
from datastreamer.storage.stream import DataStream, PathLike
from datastreamer.storage.view import IndexName
from datastreamer.storage.write.durability import SyncPolicy
from datastreamer.transport.listeners import Hosts, metrics_listeners, name_of, open_listeners
from datastreamer.transport.tls import ServerTLS

_log = logging.getLogger(__name__)

OnRewrite = Literal["stop", "follow"]

DEFAULT_PORT: Final = 7900
"""Default port of a relay."""

# Interval of log lines while a relay catches up, or has no upstream.
_SAY_SECONDS = 10.0
_REMIND_SECONDS = 60.0
# An upstream that is lost sooner without new entries counts as unreachable.
_STEADY_SECONDS = 5.0
# An upstream that closes this many connections in a row on a query for its capabilities has none.
_CLOSED_ON_ASKING = 3
# Number of ends of commits that are remembered.
_COMMITS_KEPT = 10_000


@dataclass(slots=True, eq=False)
class UpstreamState:
    """State of one upstream."""

    upstream: Upstream
    entries: int | None = None
    """Its number of entries when last reported; None: never."""

    set_aside: DatastreamerError | None = None
    """Why it is not used any more until the relay is restarted."""

    lost: str = ""
    """Why it cannot be used now; empty if it can."""

    shorter_since: float | None = None
    """Since when, by the loop's clock, it holds fewer entries than the relay and gained none, while
    no upstream could be used."""

    closed_on_asking: int = 0
    """Number of connections in a row that it closed on a query for its capabilities."""

    shorter_total: int = 0
    """Its number of entries at `shorter_since`."""

    reported_shorter: bool = False
    """Whether the log says that it is reachable again and holds fewer entries than the relay."""

    distrusted: bool = False
    """Whether the relay followed an upstream that differs and precedes it: not followed again."""


class Relay:
    """Downloads a stream, stores it in the file at `path`, and serves it.

    Run it with ``await nursery.start(relay.run)``; shut it down with ``await relay.finish()``.

    `upstreams` are tried in this order, each an `Upstream` or (host, port). When an earlier one is
    reachable again and holds as many entries, the relay returns to it. A new file becomes a copy
    of the upstream's stream, which must have `stream_type`; an existing file is compared with each
    upstream before entries are appended.

    `on_rewrite` decides what happens if an upstream holds other entries than the file, or has
    truncated some: with "stop" it is set aside, and when all are, `failure` is the reason why the
    download has stopped; with "follow" the file is truncated to the last entry in common. An
    upstream with another version, system id or stream type is always set aside. The entries in
    the file are served all the time. If there are several upstreams, one that is only shorter is
    waited for; "follow" truncates if it gained no entry for `patience` seconds.

    `sync` is that of `DataStream`: with "commit" readers get entries that are on disk, and many
    commits share a sync. `host`, `port`, `unix`, `tls` and `limits` are those of `serve`;
    `timeout`, `heartbeat` and `backoff` those of `connect`. The upstreams' heads are queried every
    `look_seconds` seconds.

    `metrics_port` and `metrics_host` are those of `StreamServer`; /readyz answers 503 while the
    relay lacks more than `ready_lag` entries.
    """

    def __init__(
        self,
        upstreams: Sequence[Upstream | tuple[str, int]],
        path: PathLike,
        *,
        host: Hosts = None,
        port: int | None = DEFAULT_PORT,
        unix: PathLike | None = None,
        tls: ServerTLS | None = None,
        limits: Limits | None = None,
        sync: SyncPolicy = "commit",
        index: IndexName = "lmdb",
        stream_type: int | None = None,
        on_rewrite: OnRewrite = "stop",
        patience: float = 30.0,
        timeout: float = exchanges.TIMEOUT,
        heartbeat: float | None = 10.0,
        backoff: Backoff = BACKOFF,
        look_seconds: float = 10.0,
        metrics_port: int | None = None,
        metrics_host: Hosts = None,
        ready_lag: int = READY_LAG,
    ) -> None:
        if not upstreams:
            raise UsageError("a relay needs a server to download from")
        if on_rewrite not in ("stop", "follow"):
            raise UsageError(f'on_rewrite is "stop" or "follow", not {on_rewrite!r}')
        self.states = [
            UpstreamState(each if isinstance(each, Upstream) else Upstream(*each))
            for each in upstreams
        ]
        if stream_type is not None:
            check_number("stream_type", stream_type)
        check_waits(timeout, heartbeat=heartbeat)
        check_seconds("patience", patience, zero=True)
        check_seconds("look_seconds", look_seconds)
        check_client_tokens(None if limits is None else limits.client_token_file)
        names = Counter(state.upstream.name for state in self.states)
        if twice := [name for name, count in names.items() if count > 1]:
            raise UsageError(
                f"{twice[0]} is given {names[twice[0]]} times as a server; give it once"
            )
        self.path = os.fspath(path)
        self.stream: DataStream | None = None
        self.server: Server | None = None
        self.failure: DatastreamerError | None = None
        self.current: UpstreamState | None = None
        self.caught_up = False
        self._source: UpstreamState | None = None
        self.listen = (host, port, unix)
        self.metrics_port: int | None = None
        self.numbers: WriterNumbers | None = None
        self._listeners: list[socket.socket] = []
        self._metrics = None if metrics_port is None else (metrics_host, metrics_port)
        self._ready_lag = ready_lag
        self.tls = tls
        self._limits = limits
        self._sync: SyncPolicy = sync
        self._index = index
        self._stream_type = stream_type
        self._follow = on_rewrite == "follow"
        self._patience = patience
        self._timeout = timeout
        self._heartbeat = heartbeat
        self._backoff = backoff
        self._look_seconds = look_seconds
        self._downloading = trio.CancelScope()
        # The last known ends of the upstreams' commits.
        self._commits: deque[int] = deque(maxlen=_COMMITS_KEPT)
        self._logged_at = 0.0
        # Applies the changes that the current upstream reports.
        self._change_applier: ChangeApplier | None = None
        # Updates of earlier upstreams.
        self._updates = 0
        # Entries in the file when the current upstream was joined.
        self._joined_at = 0
        self._changed = trio.Event()

    @property
    def lag(self) -> int | None:
        """The number of entries that the current upstream holds and the relay lacks; None without a
        current upstream."""
        return None if self.current is None else lag_behind(self, self.current)

    @property
    def updates(self) -> int:
        """The number of entries that were replaced because an upstream updated them in place."""
        return self._updates + (0 if self._change_applier is None else self._change_applier.updates)

    @property
    def uncompared(self) -> int:
        """The number of entries that are still to be compared with the current upstream's."""
        return 0 if self._change_applier is None else self._change_applier.uncompared

    @property
    def unready(self) -> str:
        """The reason why clients should use another server, as /readyz says it; empty if they are
        served and the lag is at most `ready_lag`."""
        return unready(self, self._ready_lag)

    async def until(self, condition: Callable[[], bool]) -> None:
        """Return when `condition()` is true. It is evaluated now, and whenever an upstream is lost,
        found shorter, set aside or used; entries were appended, updated, compared or truncated;
        the relay has caught up, or has stopped the download."""
        while True:
            changed = self._changed
            if condition():
                return
            await changed.wait()

    def _notify(self) -> None:
        self._changed.set()
        self._changed = trio.Event()

    # Life cycle.

    async def run(
        self,
        listeners: Iterable[socket.socket] | None = None,
        task_status: trio.TaskStatus[list[tuple[str, int]]] = trio.TASK_STATUS_IGNORED,
    ) -> None:
        """Relay until cancelled, or until `finish` is through.

        `nursery.start` returns the addresses it listens on when clients are served: at once if
        there is a file, else as soon as an upstream has sent its header. `listeners` replace
        `host`, `port` and `unix`, and are closed at the end.

        Raises `ListenFailed`, what `DataStream.open` raises, and `UsageError` after `finish`.
        Later failures of upstreams or of the disk are reported in the log and by `failure`.
        """
        listeners = list(open_listeners(*self.listen) if listeners is None else listeners)
        self._listeners = listeners
        asked: list[socket.socket] = []
        try:
            self._ensure_not_finished()
            if self._metrics is not None:
                asked = metrics_listeners(*self._metrics)
                self.metrics_port = name_of(asked[0])[1]
            failure: DatastreamerError | None = None
            async with trio.open_nursery() as nursery:
                if asked:
                    snapshot = partial(gather, self)
                    await nursery.start(serve_metrics, asked, snapshot, lambda: self.unready)
                try:
                    await self._run(listeners, task_status)
                except DatastreamerError as error:
                    failure = error
                nursery.cancel_scope.cancel()
            if failure is not None:
                raise failure
        finally:
            for listener in (*listeners, *asked):
                listener.close()

    async def _run(
        self,
        listeners: list[socket.socket],
        task_status: trio.TaskStatus[list[tuple[str, int]]],
    ) -> None:
        stream = self.stream = await self._open()
        try:
            self._ensure_not_finished()
            self.numbers = None if self._metrics is None else stream.share_numbers()
            self.server = Server(stream, limits=self._limits, tls=self.tls)
            async with trio.open_nursery() as nursery:
                addresses = await nursery.start(self.server.run, listeners)
                task_status.started(addresses)
                nursery.start_soon(self._download, stream)
        finally:
            with trio.CancelScope(shield=True):
                await trio.to_thread.run_sync(stream.close)

    def _ensure_not_finished(self) -> None:
        if self._downloading.cancel_called:
            raise UsageError("this relay was finished before it served; create another")

    async def finish(self, grace: float | None = None) -> bool:
        """Stop the download, then as `Server.finish`; `run` returns then, and raises `UsageError`
        if it had not begun to serve."""
        if grace is not None:
            check_seconds("grace", grace, zero=True)
        self._downloading.cancel()
        if self.server is None or self.stream is None:
            return True
        try:
            await trio.to_thread.run_sync(self.stream.sync)
        except DatastreamerError as error:
            _log.error("%s", error)
        return await self.server.finish(grace)

    async def _open(self) -> DataStream:
        def existing() -> DataStream:
            return DataStream.open(
                self.path, stream_type=self._stream_type, sync=self._sync, index=self._index
            )

        def new() -> DataStream:
            return DataStream.create(
                self.path,
                version=header.version,
                system_id=header.system_id,
                stream_type=header.stream_type,
                sync=self._sync,
                index=self._index,
            )

        try:
            return await trio.to_thread.run_sync(existing)
        except FileMissing:
            await trio.to_thread.run_sync(_check_folder, self.path)
            header = await self._first_header()
        return await trio.to_thread.run_sync(new)

    async def _first_header(self) -> Header:
        """The header of a new file, from the first upstream that answers."""
        wanted = STREAM_TYPE_SEQUENCER if self._stream_type is None else self._stream_type
        attempt = 0
        while True:
            for state in self.states:
                try:
                    header = await header_of(state.upstream, wanted, self._timeout, self._listeners)
                except PeerError as error:
                    self._lost(state, error)
                else:
                    state.lost = ""
                    return header
            await self._pause(attempt, f"{self.path} does not exist yet")
            attempt += 1

    # Upstreams.

    async def _download(self, stream: DataStream) -> None:
        with self._downloading:
            attempt = 0
            while candidates := [state for state in self.states if state.set_aside is None]:
                for state in candidates:
                    if await self._relay_from(state, stream):
                        attempt = 0
                        break
                else:
                    if any(state.set_aside is None for state in candidates):
                        await self._pause(attempt, f"serving {stream.total_entries} entries")
                        attempt += 1
            self.failure = self.states[0].set_aside
            self._notify()
            _log.error(
                "the download has stopped, %d entries are still served: %s",
                stream.total_entries,
                self.failure,
            )

    async def _relay_from(self, state: UpstreamState, stream: DataStream) -> bool:
        """Download from one upstream until it is lost; whether anything was downloaded."""
        joined_at, before, steady = math.inf, stream.total_entries, False
        try:
            async with client_of(
                state.upstream,
                stream.header.stream_type,
                self._timeout,
                self._heartbeat,
                self._listeners,
            ) as client:
                try:
                    await trio.to_thread.run_sync(stream.sync)
                    joined = await join(client, stream, self._timeout)
                    self._check_capabilities(state, client)
                    self._joined(state, stream, joined.header)
                    joined_at = trio.current_time()
                    try:
                        if await self._receive(state, stream, joined):
                            return True
                    finally:
                        self.current, self.caught_up = None, False
                        self._updates, self._change_applier = self.updates, None
                        self._notify()
                except (UpstreamShorter, UpstreamRewritten) as error:
                    if not self._is_followed(state, error):
                        return False
                    await self._truncate_to_common(state, stream, error)
                    return True
        except UpstreamMismatch as error:
            self._set_aside(state, error)
        except DatastreamerError as error:
            # The connection or the disk failed: both may recover.
            self._lost(state, error)
            if isinstance(error, NoAnswer):
                # Another attempt would take as long and fail again.
                return False
            lasted = trio.current_time() - joined_at >= _STEADY_SECONDS
            steady = lasted and isinstance(error, PeerError)
        return steady or stream.total_entries > before

    def _check_capabilities(self, state: UpstreamState, client: Client) -> None:
        """Only several connections in a row that were lost on a query for capabilities show that
        the upstream does not support it."""
        closed = client.closed_on_asking
        state.closed_on_asking = state.closed_on_asking + 1 if closed else 0
        if 0 < state.closed_on_asking < _CLOSED_ON_ASKING:
            raise ConnectionLost(
                f"{client.peer} closed the connection on a query for its capabilities; trying again"
            )

    async def _receive(self, state: UpstreamState, stream: DataStream, joined: Joined) -> bool:
        """Append what arrives. True if an earlier upstream is to be used; else it raises."""
        back = False
        failure: DatastreamerError | None = None

        async with trio.open_nursery() as nursery:

            async def look() -> None:
                nonlocal back
                await self._watch_upstreams(state, stream)
                back = True
                nursery.cancel_scope.cancel()

            nursery.start_soon(look)
            backlog, change_applier = joined.header.total_entries, joined.change_applier
            writer = RelayWriter(stream, joined.batches, self._commits, backlog, change_applier)
            self._change_applier = change_applier

            async def compare() -> None:
                nonlocal failure
                kind, own = stream.header.stream_type, self._listeners
                connect = partial(client_of, state.upstream, kind, self._timeout, None, own)
                try:
                    await Comparison(connect, stream, writer, change_applier, self._notify).run()
                except DatastreamerError as error:
                    failure = error
                    nursery.cancel_scope.cancel()

            nursery.start_soon(compare)
            try:
                batch = joined.rest or await joined.batches.__anext__()
                while True:
                    self._source = state
                    number = await writer.write(batch)
                    state.entries = max(state.entries or 0, joined.batches.commit_ahead or 0)
                    self._progress(state, number)
                    batch = await joined.batches.__anext__()
            except StopAsyncIteration:
                failure = ConnectionLost(f"{state.upstream.name} ended the stream")
            except DatastreamerError as error:
                failure = error
            finally:
                writer.drop()
            nursery.cancel_scope.cancel()
        if failure is not None and not back:
            raise failure
        return back

    async def _watch_upstreams(self, current: UpstreamState, stream: DataStream) -> None:
        """Query the upstreams' heads; returns when an earlier one is to be used again."""
        kind = stream.header.stream_type
        while True:
            await trio.sleep(self._look_seconds)
            earlier = True
            for state in self.states:
                earlier = earlier and state is not current
                if state.set_aside is not None:
                    continue
                try:
                    header = await header_of(state.upstream, kind, self._timeout, self._listeners)
                except PeerError as error:
                    if earlier:
                        self._lost(state, error)
                    continue
                state.entries = header.total_entries
                self._notify()
                if earlier and header.total_entries >= stream.total_entries:
                    state.reported_shorter = False
                    _log.warning("%s is reachable again, returning to it", state.upstream.name)
                    return
                if earlier:
                    self._log_shorter(state, header.total_entries, stream.total_entries)

    def _log_shorter(self, state: UpstreamState, total: int, ours: int) -> None:
        """Log once that an earlier upstream is reachable again and holds fewer entries."""
        if not state.reported_shorter:
            state.reported_shorter = True
            _log.warning(
                "%s is reachable again and holds only %d entries: entries %d to %d are in doubt; "
                "returning to it once it holds as many",
                state.upstream.name,
                total,
                total,
                ours - 1,
            )

    # Upstreams that differ from the file.

    def _is_followed(
        self, state: UpstreamState, error: UpstreamShorter | UpstreamRewritten
    ) -> bool:
        """Whether to truncate the file to what this upstream holds, which differs from the file."""
        now = trio.current_time()
        if isinstance(error, UpstreamShorter):
            state.entries = error.total
            since = state.shorter_since
            if since is None:
                _log.warning("%s", error)
            if since is None or error.total > state.shorter_total:
                since = state.shorter_since = now
                state.shorter_total = error.total
                self._notify()
            # An upstream that did not send these entries may still get them.
            is_certain = len(self.states) == 1 or self._source is state
            if not is_certain and not (self._follow and now - since >= self._patience):
                state.lost = state.lost or str(error)
                return False
        if self._follow and not state.distrusted:
            self._distrust(state)
            return True
        self._set_aside(state, error)
        return False

    def _distrust(self, followed: UpstreamState) -> None:
        """Of two upstreams with different histories the earlier one is trusted from now on:
        otherwise the relay would alternate between them."""
        source = self._source
        if source is None or source.distrusted:
            return
        if self.states.index(source) > self.states.index(followed):
            source.distrusted = True
            _log.warning(
                "%s has another history than %s, which has priority, and is not followed again",
                source.upstream.name,
                followed.upstream.name,
            )

    async def _truncate_to_common(
        self, state: UpstreamState, stream: DataStream, error: UpstreamShorter | UpstreamRewritten
    ) -> None:
        """Truncate the file to what the upstream also holds."""
        total = stream.total_entries
        common = error.total if isinstance(error, UpstreamShorter) else error.first_differing
        if common is None:
            async with client_of(
                state.upstream, stream.header.stream_type, self._timeout
            ) as client:
                common = await common_entries(client, stream, total)
        while self._commits and self._commits[-1] > common:
            self._commits.pop()
        if isinstance(error, UpstreamRewritten):
            common = await trio.to_thread.run_sync(truncation_point, stream, common, self._commits)
        if common < total:
            _log.warning(
                "following %s back to %d entries: truncating entries %d to %d (%s)",
                state.upstream.name,
                common,
                common,
                total - 1,
                error,
            )
            agreement = known_agreement(stream)
            await trio.to_thread.run_sync(stream.truncate, common)
            await trio.to_thread.run_sync(keep_over_truncation, stream, agreement)
        state.shorter_since = None
        self._notify()

    # State and log.

    def _set_aside(self, state: UpstreamState, error: DatastreamerError) -> None:
        state.set_aside = error
        self._notify()
        _log.error("%s is set aside and not used any more: %s", state.upstream.name, error)

    def _lost(self, state: UpstreamState, error: DatastreamerError) -> None:
        """Log the failure of an upstream or of the disk once, not at each attempt."""
        if not state.lost:
            _log.warning("%s: %s", state.upstream.name, str(error).partition(";")[0])
        state.lost = str(error)
        self._notify()

    def _joined(self, state: UpstreamState, stream: DataStream, header: Header) -> None:
        self.current, self.caught_up = state, False
        state.entries = header.total_entries
        for each in self.states:
            # Shorter upstreams get their full `patience` again if this one is lost.
            each.shorter_since = None
        self._joined_at = stream.total_entries
        if not state.lost:
            self._log_relaying(state)
        self._logged_at = trio.current_time()
        self._progress(state, stream.total_entries)

    def _log_relaying(self, state: UpstreamState) -> None:
        _log.info(
            "relaying from %s: next entry %d, the upstream holds %d",
            state.upstream.name,
            self._joined_at,
            state.entries,
        )

    def _progress(self, state: UpstreamState, next_number: int) -> None:
        self._notify()
        here = 0 if self.stream is None else self.stream.total_entries
        if state.lost and (here > self._joined_at or next_number >= (state.entries or 0)):
            # Only now, so that a failure after each join is logged once.
            state.lost = ""
            self._log_relaying(state)
        if next_number >= (state.entries or 0):
            state.entries = next_number
            if not self.caught_up:
                self.caught_up = True
                _log.info("caught up with %s at entry %d", state.upstream.name, next_number)
            return
        now = trio.current_time()
        if now - self._logged_at >= _SAY_SECONDS:
            self._logged_at = now
            _log.info(
                "catching up with %s: entry %d of %d",
                state.upstream.name,
                next_number,
                state.entries,
            )

    async def _pause(self, attempt: int, what: str) -> None:
        now = trio.current_time()
        if attempt == 0:
            self._logged_at = now
        elif now - self._logged_at >= _REMIND_SECONDS:
            self._logged_at = now
            why = "; ".join(state.lost for state in self.states if state.lost)
            _log.warning("still no upstream to relay from, %s: %s", what, why)
        await trio.sleep(self._backoff.wait(attempt, random.random()))  # noqa: S311


def _check_folder(path: str) -> None:
    """Raises `FileMissing` before any upstream is queried."""
    if not os.path.isdir(os.path.dirname(os.path.abspath(path))):
        raise FileMissing(path, "no such folder")
