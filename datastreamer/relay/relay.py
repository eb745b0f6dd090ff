"""A relay: a stream that is downloaded, kept in a file and served on.

Owns the choice among upstreams and what follows from their being lost, behind or rewritten.
How a file is compared with an upstream is `upstream`'s, how it is written `keeping`'s.
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
from datastreamer.relay.truncation_point import whole_before
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
"""Where a relay listens, unless told otherwise."""

# While a relay is behind, or without an upstream, it says so this often.
_SAY_SECONDS = 10.0
_REMIND_SECONDS = 60.0
# An upstream that is lost sooner, and gave nothing, counts as one that is not there.
_STEADY_SECONDS = 5.0
# One that closes on the question what it can do so often in a row does not know it.
_CLOSED_ON_ASKING = 3
# So many ends of commits are remembered.
_COMMITS_KEPT = 10_000


@dataclass(slots=True, eq=False)
class UpstreamState:
    """What is known of one upstream."""

    upstream: Upstream
    entries: int | None = None
    """How many it held when it last said so; None: it never did."""

    set_aside: DatastreamerError | None = None
    """Why nothing is taken from it any more, until the relay is started anew."""

    lost: str = ""
    """Why it cannot be had now."""

    behind_since: float | None = None
    """Since when, by the loop's clock, it has been found to hold less than we do, and no more
    than it did then, while no upstream could be had."""

    closed_on_asking: int = 0
    """How many connections in a row it closed on the question what it can do."""

    behind_at: int = 0
    """How many it held then."""

    told_behind: bool = False
    """Whether it was said that it is there again and holds less than we do."""

    overruled: bool = False
    """Whether an earlier upstream was followed that told otherwise: it is not followed again."""


class Relay:
    """Downloads a stream, keeps it in the file at `path`, and serves it.

    ``await nursery.start(relay.run)``, and ``await relay.finish()`` for a good end.

    `upstreams` are tried in this order, each an `Upstream` or (host, port); when a later one
    is used and an earlier one is there again and holds as much, the relay goes back to it. A
    new file becomes the upstream's stream (`stream_type` is what it is asked for); an
    existing one is compared with each upstream before anything of it is appended.

    `on_rewrite` says what becomes of an upstream that holds other entries than ours, or has
    taken some back: with "stop" it is set aside, and when none is left `failure` says why
    nothing is downloaded any more; with "follow" our file is cut back to the last entry in
    common. A stream of another version, system id or type is always set aside. What is here
    is served all the time. An upstream that is merely behind, where there are others, is
    waited for; "follow" does so until it has got nothing new for `patience` seconds.

    `sync` is that of `DataStream`: with "commit" readers get what is on disk, with syncs
    that many commits share. `host`, `port`, `unix`, `tls` and `limits` are those of `serve`.
    `timeout`, `heartbeat` and `backoff` are those of `connect`. Every `look_seconds` the
    upstreams are asked how far they are.

    `metrics_port` and `metrics_host` are those of `StreamServer`; /readyz says no while more
    than `ready_lag` entries are known to be missing here.
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
                f"{twice[0]} is named {names[twice[0]]} times as a server; once will do"
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
        # Where commits of upstreams ended, of those that told, the last ones.
        self._commits: deque[int] = deque(maxlen=_COMMITS_KEPT)
        self._said = 0.0
        # What is applied of the changes that the upstream in use reports.
        self._applying: ChangeApplier | None = None
        # Of the upstreams before.
        self._updates = 0
        # What we held when the upstream in use was joined.
        self._joined_at = 0
        self._changed = trio.Event()

    @property
    def lag(self) -> int | None:
        """How many entries the upstream in use is known to hold that are not here; None
        where there is no such upstream."""
        return None if self.current is None else lag_behind(self, self.current)

    @property
    def updates(self) -> int:
        """How many entries were replaced because an upstream updated them in place."""
        return self._updates + (0 if self._applying is None else self._applying.updates)

    @property
    def uncompared(self) -> int:
        """How many entries here are still to be compared with those of the upstream in use."""
        return 0 if self._applying is None else self._applying.doubtful

    @property
    def unready(self) -> str:
        """Why clients had better go elsewhere, as /readyz says it; empty where they are served
        and `ready_lag` is kept."""
        return unready(self, self._ready_lag)

    async def until(self, condition: Callable[[], bool]) -> None:
        """Return when `condition` is true of this relay. It is looked at now, and whenever an
        upstream was lost, found behind, set aside or is used; entries were kept, changed,
        compared or taken back; the relay has caught up, or has ended to download."""
        while True:
            changed = self._changed
            if condition():
                return
            await changed.wait()

    def _tell(self) -> None:
        self._changed.set()
        self._changed = trio.Event()

    # Its life.

    async def run(
        self,
        listeners: Iterable[socket.socket] | None = None,
        task_status: trio.TaskStatus[list[tuple[str, int]]] = trio.TASK_STATUS_IGNORED,
    ) -> None:
        """Relay until cancelled, or until `finish` is through.

        Starts with the addresses it listens on, when clients are served: at once where there
        is a file; where there is none, as soon as an upstream says whose stream it is.
        `listeners` are used in place of `host`, `port` and `unix`, and closed at the end.

        Raises `ListenFailed`, what `DataStream.open` raises, and `UsageError` after `finish`.
        Whatever becomes of upstreams or of the disk afterwards is told in the log and by
        `failure`.
        """
        listeners = list(open_listeners(*self.listen) if listeners is None else listeners)
        self._listeners = listeners
        asked: list[socket.socket] = []
        try:
            self._ensure_wanted()
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
            self._ensure_wanted()
            self.numbers = None if self._metrics is None else stream.share_numbers()
            self.server = Server(stream, limits=self._limits, tls=self.tls)
            async with trio.open_nursery() as nursery:
                addresses = await nursery.start(self.server.run, listeners)
                task_status.started(addresses)
                nursery.start_soon(self._download, stream)
        finally:
            with trio.CancelScope(shield=True):
                await trio.to_thread.run_sync(stream.close)

    def _ensure_wanted(self) -> None:
        if self._downloading.cancel_called:
            raise UsageError("this relay was ended before it served; make another")

    async def finish(self, grace: float | None = None) -> bool:
        """Download nothing more, then as `Server.finish`; `run` returns then, and raises
        `UsageError` where it had not begun to serve."""
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
        """Whose stream a new file will hold, from the first upstream that says so."""
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
            await self._pause(attempt, f"{self.path} is not there yet")
            attempt += 1

    # Upstreams, one after the other.

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
            self._tell()
            _log.error(
                "nothing is downloaded any more, %d entries are served on: %s",
                stream.total_entries,
                self.failure,
            )

    async def _relay_from(self, state: UpstreamState, stream: DataStream) -> bool:
        """Download from one upstream while that goes well; whether it did at all."""
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
                    self._ensure_understood(state, client)
                    self._joined(state, stream, joined.header)
                    joined_at = trio.current_time()
                    try:
                        if await self._stream_on(state, stream, joined):
                            return True
                    finally:
                        self.current, self.caught_up = None, False
                        self._updates, self._applying = self.updates, None
                        self._tell()
                except (UpstreamShorter, UpstreamRewritten) as error:
                    if not self._is_followed(state, error):
                        return False
                    await self._go_back(state, stream, error)
                    return True
        except UpstreamMismatch as error:
            self._set_aside(state, error)
        except DatastreamerError as error:
            # Of the connection, or of our own disk: both may be well again.
            self._lost(state, error)
            if isinstance(error, NoAnswer):
                # Another attempt would take as long, and come to the same.
                return False
            lasted = trio.current_time() - joined_at >= _STEADY_SECONDS
            steady = lasted and isinstance(error, PeerError)
        return steady or stream.total_entries > before

    def _ensure_understood(self, state: UpstreamState, client: Client) -> None:
        """A connection that is lost while the upstream is asked what it can do does not make it
        one that cannot tell where commits end: only some in a row do."""
        closed = client.closed_on_asking
        state.closed_on_asking = state.closed_on_asking + 1 if closed else 0
        if 0 < state.closed_on_asking < _CLOSED_ON_ASKING:
            raise ConnectionLost(f"{client.peer} closed the connection on a question; asked again")

    async def _stream_on(self, state: UpstreamState, stream: DataStream, joined: Joined) -> bool:
        """Keep what comes. True where an earlier upstream is to be used; else it raises."""
        back = False
        failure: DatastreamerError | None = None

        async with trio.open_nursery() as nursery:

            async def look() -> None:
                nonlocal back
                await self._look_around(state, stream)
                back = True
                nursery.cancel_scope.cancel()

            nursery.start_soon(look)
            backlog, applying = joined.header.total_entries, joined.applying
            keeping = RelayWriter(stream, joined.batches, self._commits, backlog, applying)
            self._applying = applying

            async def compare() -> None:
                nonlocal failure
                kind, own = stream.header.stream_type, self._listeners
                connect = partial(client_of, state.upstream, kind, self._timeout, None, own)
                try:
                    await Comparison(connect, stream, keeping, applying, self._tell).run()
                except DatastreamerError as error:
                    failure = error
                    nursery.cancel_scope.cancel()

            nursery.start_soon(compare)
            try:
                batch = joined.rest or await joined.batches.__anext__()
                while True:
                    self._source = state
                    number = await keeping.keep(batch)
                    state.entries = max(state.entries or 0, joined.batches.commit_ahead or 0)
                    self._progress(state, number)
                    batch = await joined.batches.__anext__()
            except StopAsyncIteration:
                failure = ConnectionLost(f"{state.upstream.name} ended the stream")
            except DatastreamerError as error:
                failure = error
            finally:
                keeping.drop()
            nursery.cancel_scope.cancel()
        if failure is not None and not back:
            raise failure
        return back

    async def _look_around(self, current: UpstreamState, stream: DataStream) -> None:
        """Ask upstreams how far they are; returns when an earlier one is to be used again."""
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
                self._tell()
                if earlier and header.total_entries >= stream.total_entries:
                    state.told_behind = False
                    _log.warning("%s is there again, going back to it", state.upstream.name)
                    return
                if earlier:
                    self._note_behind(state, header.total_entries, stream.total_entries)

    def _note_behind(self, state: UpstreamState, total: int, ours: int) -> None:
        """An earlier upstream is there again and holds less than we do: said once."""
        if not state.told_behind:
            state.told_behind = True
            _log.warning(
                "%s is there again and holds %d entries: entries %d to %d are in doubt; going back "
                "to it once it holds as many",
                state.upstream.name,
                total,
                total,
                ours - 1,
            )

    # Differences.

    def _is_followed(
        self, state: UpstreamState, error: UpstreamShorter | UpstreamRewritten
    ) -> bool:
        """What an upstream that does not hold what we do comes to: whether we go back."""
        now = trio.current_time()
        if isinstance(error, UpstreamShorter):
            state.entries = error.total
            since = state.behind_since
            if since is None:
                _log.warning("%s", error)
            if since is None or error.total > state.behind_at:
                since = state.behind_since = now
                state.behind_at = error.total
                self._tell()
            # Where it is not the one that gave us these entries, it may well get them yet.
            sure = len(self.states) == 1 or self._source is state
            if not sure and not (self._follow and now - since >= self._patience):
                state.lost = state.lost or str(error)
                return False
        if self._follow and not state.overruled:
            self._overrule(state)
            return True
        self._set_aside(state, error)
        return False

    def _overrule(self, followed: UpstreamState) -> None:
        """Of two that tell different histories the earlier is believed, once for all: else the
        relay, and its clients, went to and fro between them."""
        source = self._source
        if source is None or source.overruled:
            return
        if self.states.index(source) > self.states.index(followed):
            source.overruled = True
            _log.warning(
                "%s tells another history than %s, which is before it, and is not followed again",
                source.upstream.name,
                followed.upstream.name,
            )

    async def _go_back(
        self, state: UpstreamState, stream: DataStream, error: UpstreamShorter | UpstreamRewritten
    ) -> None:
        """Cut our file back to what the upstream holds too."""
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
            common = await trio.to_thread.run_sync(whole_before, stream, common, self._commits)
        if common < total:
            _log.warning(
                "following %s back to %d entries: entries %d to %d are cut off (%s)",
                state.upstream.name,
                common,
                common,
                total - 1,
                error,
            )
            agreement = known_agreement(stream)
            await trio.to_thread.run_sync(stream.truncate, common)
            await trio.to_thread.run_sync(keep_over_truncation, stream, agreement)
        state.behind_since = None
        self._tell()

    # What is said.

    def _set_aside(self, state: UpstreamState, error: DatastreamerError) -> None:
        state.set_aside = error
        self._tell()
        _log.error("nothing more is taken from %s: %s", state.upstream.name, error)

    def _lost(self, state: UpstreamState, error: DatastreamerError) -> None:
        """A line when an upstream, or our disk, fails; none for each attempt after."""
        if not state.lost:
            _log.warning("%s: %s", state.upstream.name, str(error).partition(";")[0])
        state.lost = str(error)
        self._tell()

    def _joined(self, state: UpstreamState, stream: DataStream, header: Header) -> None:
        self.current, self.caught_up = state, False
        state.entries = header.total_entries
        for each in self.states:
            # Those that are behind have time again, should this one be lost.
            each.behind_since = None
        self._joined_at = stream.total_entries
        if not state.lost:
            self._say_relaying(state)
        self._said = trio.current_time()
        self._progress(state, stream.total_entries)

    def _say_relaying(self, state: UpstreamState) -> None:
        _log.info(
            "relaying from %s: entry %d is next, it holds %d",
            state.upstream.name,
            self._joined_at,
            state.entries,
        )

    def _progress(self, state: UpstreamState, next_number: int) -> None:
        self._tell()
        here = 0 if self.stream is None else self.stream.total_entries
        if state.lost and (here > self._joined_at or next_number >= (state.entries or 0)):
            # Not before: what fails after each join is said once.
            state.lost = ""
            self._say_relaying(state)
        if next_number >= (state.entries or 0):
            state.entries = next_number
            if not self.caught_up:
                self.caught_up = True
                _log.info("caught up with %s at entry %d", state.upstream.name, next_number)
            return
        now = trio.current_time()
        if now - self._said >= _SAY_SECONDS:
            self._said = now
            _log.info(
                "catching up with %s: entry %d of %d",
                state.upstream.name,
                next_number,
                state.entries,
            )

    async def _pause(self, attempt: int, what: str) -> None:
        now = trio.current_time()
        if attempt == 0:
            self._said = now
        elif now - self._said >= _REMIND_SECONDS:
            self._said = now
            why = "; ".join(state.lost for state in self.states if state.lost)
            _log.warning("still nothing to relay from, %s: %s", what, why)
        await trio.sleep(self._backoff.wait(attempt, random.random()))  # noqa: S311


def _check_folder(path: str) -> None:
    """Before anybody is asked what to keep there. Raises `FileMissing`."""
    if not os.path.isdir(os.path.dirname(os.path.abspath(path))):
        raise FileMissing(path, "no such folder")
