"""The download of a relay: which upstream it copies, and what follows if one is lost, shorter or
rewritten.

Owns the state of each upstream. `joining.py` compares the file with an upstream, `writer.py`
writes it. Serves nothing.
"""

from __future__ import annotations

import logging
import math
import random
import socket
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from functools import partial

import trio

from datastreamer.client.upstream import Upstream
from datastreamer.errors import (
    ConnectionLost,
    DamagedEntry,
    DatastreamerError,
    NoAnswer,
    PeerError,
    StreamFileError,
    UpstreamDamaged,
    UpstreamMismatch,
    UpstreamRewritten,
    UpstreamShorter,
)
from datastreamer.format import STREAM_TYPE_SEQUENCER, Header
from datastreamer.metrics.counters import Counts
from datastreamer.printable import counted
from datastreamer.protocol.retry import Backoff
from datastreamer.relay.apply_changes import ChangeApplier
from datastreamer.relay.checksums import ASIDE, ReceivedCheck, SumsClient
from datastreamer.relay.client import RelayClient, client_of
from datastreamer.relay.compare import Comparison
from datastreamer.relay.damaged_pages import restore_pages
from datastreamer.relay.joining import Joined, common_entries, ensure_undamaged, join
from datastreamer.relay.set_aside import try_again
from datastreamer.relay.times import keep_times
from datastreamer.relay.truncation_point import truncate_file
from datastreamer.relay.upstream_state import WAY_ON, UpstreamState
from datastreamer.relay.writer import RelayWriter
from datastreamer.storage.stream import DataStream

_log = logging.getLogger(__name__)

# Interval of log lines while a relay catches up, or has no upstream.
_SAY_SECONDS = 2.0
_REMIND_SECONDS = 60.0
# An upstream that is lost sooner without new entries counts as unreachable.
_STEADY_SECONDS = 5.0
# An upstream that sends damaged entries is avoided for this many times the wait after a lost one.
_AVOIDED_FACTOR = 60
# Number of ends of commits that are remembered.
_COMMITS_KEPT = 10_000


class Download:
    """Copies the stream of the first of `upstreams` that can be used; see `Relay`.

    `follow`: truncate the file to what a rewritten upstream also holds. `stream` is None until
    `run`.
    """

    def __init__(
        self,
        upstreams: Sequence[Upstream],
        *,
        stream_type: int | None,
        follow: bool,
        patience: float,
        timeout: float,
        heartbeat: float | None,
        backoff: Backoff,
        look_seconds: float,
    ) -> None:
        self.states = [UpstreamState(each) for each in upstreams]
        self.stream: DataStream | None = None
        self.failure: DatastreamerError | None = None
        """Why nothing is downloaded: every upstream is set aside."""
        self.current: UpstreamState | None = None
        """The upstream that the relay is connected to."""
        self.caught_up = False
        self.own: Sequence[socket.socket] = ()
        """The relay's own listeners, which are no upstreams."""
        self.scope = trio.CancelScope()
        """Cancel it to end the download."""
        self.counts = Counts()
        """Those of the relay's server, once it runs."""
        # The last upstream that entries were appended from.
        self._source: UpstreamState | None = None
        self._stream_type = STREAM_TYPE_SEQUENCER if stream_type is None else stream_type
        self._follow = follow
        self._patience = patience
        self._timeout = timeout
        self._heartbeat = heartbeat
        self._backoff = backoff
        self._look_seconds = look_seconds
        # The last known ends of the upstreams' commits.
        self._commits: deque[int] = deque(maxlen=_COMMITS_KEPT)
        self._logged_at = 0.0
        # Applies the changes that the current upstream reports.
        self._change_applier: ChangeApplier | None = None
        # Updates of earlier upstreams.
        self._updates = 0
        # Entries in the file when the current upstream was joined, and when that was.
        self._joined_at, self._joined_time = 0, math.inf
        # Damage of the file, to be restored from the next upstream.
        self._damage: DamagedEntry | None = None
        self._changed = trio.Event()

    @property
    def updates(self) -> int:
        """The number of entries that were replaced because an upstream updated them in place."""
        return self._updates + (0 if self._change_applier is None else self._change_applier.updates)

    @property
    def uncompared(self) -> int:
        """The number of entries that are still to be compared with the current upstream's."""
        return 0 if self._change_applier is None else self._change_applier.uncompared

    def lag_behind(self, state: UpstreamState | None) -> int | None:
        """The number of entries that the upstream holds and the relay lacks; None: not known."""
        if state is None or state.entries is None:
            return None
        here = 0 if self.stream is None else self.stream.total_entries
        return max(0, state.entries - here)

    async def until(self, condition: Callable[[], bool]) -> None:
        """As `Relay.until`."""
        while True:
            changed = self._changed
            if condition():
                return
            await changed.wait()

    def _notify(self) -> None:
        for state in self.states:
            state.note(self.current)
        self._changed.set()
        self._changed = trio.Event()

    async def first_header(self, path: str) -> Header:
        """The header for a new file at `path`, from the first upstream that answers."""
        attempt = 0
        while True:
            for state in self.states:
                try:
                    header = await self._header_of(state)
                except PeerError as error:
                    self._lost(state, error)
                else:
                    state.lost = ""
                    return header
            await self._pause(attempt, f"{path} does not exist yet")
            attempt += 1

    def _connect(
        self, state: UpstreamState, heartbeat: float | None = None, name: str | None = None
    ) -> AbstractAsyncContextManager[RelayClient]:
        upstream, own = state.upstream, self.own
        return client_of(upstream, self._stream_type, self._timeout, heartbeat, own, name)

    async def _header_of(self, state: UpstreamState) -> Header:
        """The header of the upstream's stream now. Raises `PeerError`."""
        with trio.move_on_after(self._timeout):
            async with self._connect(state) as client:
                return await client.header()
        raise NoAnswer(f"no answer from {state.upstream.name} within {self._timeout:g} s")

    # Upstreams.

    async def run(self, stream: DataStream) -> None:
        """Download into `stream` until cancelled."""
        self.stream, self._stream_type = stream, stream.header.stream_type
        with self.scope:
            async with trio.open_nursery() as nursery:
                again = (self.states, self._connect, stream, self._look_seconds, self._notify)
                nursery.start_soon(try_again, *again)
                while True:
                    await self._download(stream)
                    await self.until(lambda: any(each.set_aside is None for each in self.states))
                    self.failure = None

    async def _download(self, stream: DataStream) -> None:
        """Download until all upstreams are set aside; then `failure` is the reason."""
        attempt = 0
        while candidates := [state for state in self.states if state.set_aside is None]:
            for state in candidates:
                if state.unused_until > trio.current_time():
                    continue
                if await self._relay_from(state, stream):
                    attempt = 0
                    break
            else:
                if any(state.set_aside is None for state in candidates):
                    await self._pause(attempt, f"serving {counted(stream.total_entries)}")
                    attempt += 1
        self.failure = self.states[0].set_aside
        self._notify()
        _log.error(
            "the download has stopped, %d entries are still served: %s",
            stream.total_entries,
            self.failure,
        )

    async def _relay_from(self, state: UpstreamState, stream: DataStream) -> bool:
        """Download from one upstream until it is lost; whether anything was downloaded, or another
        attempt is to be made at once, with the first upstream."""
        before = stream.total_entries
        while True:
            restores, self._joined_time = self._damage is not None, math.inf
            try:
                return await self._copy_or_follow(state, stream)
            except UpstreamMismatch as error:
                self._set_aside(state, error)
            except UpstreamDamaged as error:
                self._avoid(state, error)
                return False
            except DamagedEntry as damage:  # of the file: an upstream's is a `PeerError`
                self._damage = damage
                if not restores or self._lasted:
                    continue
            except DatastreamerError as error:
                # The connection or the disk failed: both may recover.
                self._lost(state, error)
                if isinstance(error, NoAnswer):
                    # Another attempt would take as long and fail again.
                    return False
                if self._lasted and isinstance(error, PeerError):
                    return True
            except OSError as error:
                self._lost(state, StreamFileError(stream.path, error.strerror or str(error)))
            return stream.total_entries > before

    @property
    def _lasted(self) -> bool:
        """Whether the upstream was used for a while."""
        return trio.current_time() - self._joined_time >= _STEADY_SECONDS

    async def _copy_or_follow(self, state: UpstreamState, stream: DataStream) -> bool:
        """As `_copy`; True also if the file was truncated to what the upstream holds, False if this
        one differs and is not used."""
        try:
            return await self._copy(state, stream)
        except (UpstreamShorter, UpstreamRewritten) as error:
            if isinstance(error, UpstreamRewritten):
                async with self._connect(state) as client:
                    await ensure_undamaged(client, stream, error)
            if not self._is_followed(state, error):
                return False
            await self._truncate_to_common(state, stream, error)
            return True

    async def _copy(self, state: UpstreamState, stream: DataStream) -> bool:
        """Restore damaged pages, join the upstream, and append what arrives. True if an earlier
        upstream is to be used; else it raises."""
        damage, self._damage = self._damage, None
        if damage is not None:
            connect = partial(self._connect, state)
            restored = await restore_pages(connect, stream, damage, self._timeout)
            self.counts.healed_pages += restored
        async with self._connect(state, self._heartbeat) as client:
            await trio.to_thread.run_sync(stream.sync)
            joined = await join(client, stream, self._timeout)
            state.count_closed_on_asking(client.closed_on_asking, client.peer)
            self._joined(state, stream, joined.header)
            try:
                aside = SumsClient(
                    partial(self._connect, state, name=ASIDE), client.peer, self._timeout
                )
                return await self._receive(state, stream, joined, client, aside)
            finally:
                self.current, self.caught_up = None, False
                self._updates, self._change_applier = self.updates, None
                self._notify()

    async def _receive(
        self,
        state: UpstreamState,
        stream: DataStream,
        joined: Joined,
        client: RelayClient,
        aside: SumsClient,
    ) -> bool:
        """Append what arrives. True if an earlier upstream is to be used; else it raises."""
        back = False
        failure: Exception | None = None

        async with trio.open_nursery() as nursery:

            async def look() -> None:
                nonlocal back
                await self._watch_upstreams(state, stream)
                back = True
                nursery.cancel_scope.cancel()

            nursery.start_soon(look)
            nursery.start_soon(aside.run)
            known = client.known_capabilities
            if known.times:
                nursery.start_soon(keep_times, aside, stream, self.until)
            backlog, change_applier = joined.header.total_entries, joined.change_applier
            check = None
            if known.page_sums and change_applier.agreement is not None:
                check = ReceivedCheck(aside, stream, change_applier)
            writer = RelayWriter(
                stream, joined.batches, self._commits, backlog, change_applier, check
            )
            self._change_applier = change_applier

            async def compare() -> None:
                nonlocal failure
                connect = partial(self._connect, state)
                try:
                    await Comparison(connect, stream, writer, change_applier, self._notify).run()
                except (DatastreamerError, OSError) as error:
                    failure = error
                    nursery.cancel_scope.cancel()

            nursery.start_soon(compare)
            try:
                if check is not None:
                    await check.begin()
                batch = joined.rest or await joined.batches.__anext__()
                while True:
                    self._source = state
                    number = await writer.write(batch)
                    state.entries = max(state.entries or 0, joined.batches.commit_ahead or 0)
                    self._progress(state, number)
                    batch = await joined.batches.__anext__()
            except StopAsyncIteration:
                failure = ConnectionLost(f"{state.upstream.name} ended the stream")
            except (DatastreamerError, OSError) as error:
                failure = error
            finally:
                writer.drop()
            nursery.cancel_scope.cancel()
        if failure is not None and not back:
            raise failure
        return back

    async def _watch_upstreams(self, current: UpstreamState, stream: DataStream) -> None:
        """Query the upstreams' heads; returns when an earlier one is to be used again."""
        while True:
            await trio.sleep(self._look_seconds)
            earlier = True
            for state in self.states:
                earlier = earlier and state is not current
                if state.set_aside is not None or state.unused_until > trio.current_time():
                    continue
                try:
                    header = await self._header_of(state)
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
                    state.log_shorter(header.total_entries, stream.total_entries)

    # Upstreams that differ from the file.

    def _is_followed(
        self, state: UpstreamState, error: UpstreamShorter | UpstreamRewritten
    ) -> bool:
        """Whether to truncate the file to what this upstream holds, which differs from the file."""
        now = trio.current_time()
        if isinstance(error, UpstreamShorter):
            since = state.found_shorter(error, now)
            self._notify()
            # An upstream that did not send these entries may still get them.
            is_certain = len(self.states) == 1 or self._source is state
            if not is_certain and not (self._follow and now - since >= self._patience):
                state.lost = state.lost or str(error)
                return False
        if self._follow and not state.distrusted:
            self._distrust(state)
            return True
        if not self._follow:
            error.args = (f"{error}{WAY_ON}",)
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
            async with self._connect(state) as client:
                common = await common_entries(client, stream, total)
        left = await trio.to_thread.run_sync(
            partial(truncate_file, boundary=isinstance(error, UpstreamShorter)),
            *(stream, common, self._commits),
        )
        if left < total:
            _log.warning(
                "truncated entries %d to %d, to follow the history of %s (%s)",
                *(left, total - 1, state.upstream.name, error),
            )
        state.shorter_since = None
        self._notify()

    # State and log.

    def _set_aside(self, state: UpstreamState, error: DatastreamerError) -> None:
        state.set_aside = error
        self._notify()
        state.log_failure(logging.ERROR, "is set aside until it holds the relay's entries", error)

    def _avoid(self, state: UpstreamState, error: UpstreamDamaged) -> None:
        """Do not use for a while what sends damaged entries."""
        wait = self._backoff.wait(state.damaged_in_a_row, random.random())  # noqa: S311
        state.damaged += 1
        state.damaged_in_a_row += 1
        state.unused_until = trio.current_time() + _AVOIDED_FACTOR * wait
        state.lost = str(error)
        self._notify()
        state.log_failure(logging.ERROR, f"is not used for {_AVOIDED_FACTOR * wait:.1f} s", error)

    def _lost(self, state: UpstreamState, error: DatastreamerError) -> None:
        """Log the failure of an upstream or of the disk once, not at each attempt."""
        if not state.lost:
            state.log_failure(logging.WARNING, "", error)
        state.lost = str(error)
        self._notify()

    def _joined(self, state: UpstreamState, stream: DataStream, header: Header) -> None:
        self.current, self.caught_up = state, False
        state.entries = header.total_entries
        for each in self.states:
            # Shorter upstreams get their full `patience` again if this one is lost.
            each.shorter_since = None
        self._joined_at, self._joined_time = stream.total_entries, trio.current_time()
        if not state.lost:
            state.log_relaying(self._joined_at)
        self._logged_at = trio.current_time()
        self._progress(state, stream.total_entries)

    def _progress(self, state: UpstreamState, next_number: int) -> None:
        self._notify()
        assert self.stream is not None
        here = self.stream.total_entries
        if state.lost and (here > self._joined_at or next_number >= (state.entries or 0)):
            # Only now, so that a failure after each join is logged once.
            state.lost = ""
            state.log_relaying(self._joined_at)
        if next_number >= (state.entries or 0):
            state.entries = next_number
            if not self.caught_up:
                self.caught_up = True
                state.damaged_in_a_row = 0
                if next_number:  # an upstream without entries may itself be catching up
                    state.log_progress("caught up with %s at entry %d", next_number)
            return
        now = trio.current_time()
        if not self.caught_up and now - self._logged_at >= _SAY_SECONDS:
            self._logged_at = now
            share = 100 * next_number // (state.entries or 1)
            text = "catching up with %s: entry %d of %d, %d %%"
            state.log_progress(text, next_number, state.entries, share)

    async def _pause(self, attempt: int, what: str) -> None:
        now = trio.current_time()
        if attempt == 0:
            self._logged_at = now
        elif now - self._logged_at >= _REMIND_SECONDS:
            self._logged_at = now
            why = "; ".join(state.lost for state in self.states if state.lost)
            _log.warning("still no upstream to relay from, %s: %s", what, why)
        await trio.sleep(self._backoff.wait(attempt, random.random()))  # noqa: S311
