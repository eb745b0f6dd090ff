"""Time limits of clients: one task checks all sessions about once a second.

Owns the state of each client at the last check and the reasons for an end; reports idle clients
to the gate. A client is never ended for being slow: one that receives a byte, or sends a command,
is alive. Time limits are exact to about a second.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

import trio

from datastreamer.server.admission.gate import (
    IDLE_SECONDS,
    Gate,
    Idle,
)
from datastreamer.server.limits import Limits
from datastreamer.server.session import Session
from datastreamer.server.ticks import until_tick
from datastreamer.transport.tcp_info import tcp_info

_LOOK_SECONDS = 1.0
# Sessions checked before this task yields: 0.2 to 0.6 ms.
_SESSIONS_A_TURN = 64
# Interval of queries for a connection's TCP information, which cost more than the rest.
_PROBE_SECONDS = 10.0

HANDSHAKE: Final = "handshake_timeout"
HALF_COMMAND: Final = "command_timeout"
INACTIVE: Final = "inactivity_timeout"
STALLED: Final = "write_timeout"
DEAD_PEER: Final = "dead_peer_timeout"

_WORDS = {
    HANDSHAKE: "it has sent nothing for {:g} s since it connected",
    HALF_COMMAND: "it has sent part of a command, and not the rest within {:g} s",
    INACTIVE: "it has neither streamed nor sent a command for {:g} s",
    STALLED: "it has received nothing for {:g} s",
    DEAD_PEER: "its host has not answered for {:g} s",
}
LIFETIMES: Final = tuple(_WORDS)
"""The reasons for an end here, as labels of metrics."""

# Connections that are reset, so that unsent bytes are dropped.
_RESET = (STALLED, DEAD_PEER)


async def guard(sessions: Collection[Session], limits: Limits, gate: Gate) -> None:
    """Check `sessions`, a changing set, and `gate`, forever."""
    while True:
        await until_tick(_LOOK_SECONDS)
        gate.tick(trio.current_time())
        idle: list[Idle] = []
        crowded = gate.crowded
        for at, session in enumerate(list(sessions)):
            if at % _SESSIONS_A_TURN == _SESSIONS_A_TURN - 1:
                await trio.lowlevel.checkpoint()
            session.sender.note_received()
            reason = due(session, limits, trio.current_time())
            if reason is not None:
                seconds = getattr(limits, reason)
                session.end(reason, _WORDS[reason].format(seconds), reset=reason in _RESET)
            since = session.idle_since() if crowded else None
            if since is not None and trio.current_time() - since >= IDLE_SECONDS:
                idle.append((session.client_proof.trust, since, session))
        gate.note_idle(idle)


def due(session: Session, limits: Limits, now: float) -> str | None:
    """The reason to end the client now, or None. Updates the session's `watch`."""
    if session.over:
        return None
    watch, waiting, blocked = session.watch, session.waiting, session.blocked
    asked = session.taken != watch.taken
    watch.taken = session.taken
    if not session.heard:
        if _past(limits.handshake_timeout, watch.came_at, now):
            return HANDSHAKE
    elif asked or not (waiting and session.protocol.pending):
        watch.half_at = now
    elif _past(limits.command_timeout, watch.half_at, now):
        return HALF_COMMAND
    sent, acknowledged = session.sent, watch.acknowledged
    dead_after = limits.dead_peer_timeout
    probe = dead_after is not None and now >= watch.probe_at
    if session.socket is not None and (probe or blocked):
        info = tcp_info(session.socket)
        watch.probe_at = now + min(_PROBE_SECONDS, (dead_after or _PROBE_SECONDS) / 4)
        if info is not None:
            acknowledged = info.acknowledged
            if dead_after is not None and info.dead_for(dead_after):
                return DEAD_PEER
    moved = sent != watch.sent or acknowledged != watch.acknowledged
    watch.sent, watch.acknowledged = sent, acknowledged
    if moved or not blocked:
        watch.moved_at = now
    elif _past(limits.write_timeout, watch.moved_at, now):
        return STALLED
    # If neither side waits for the other, the server works for the client.
    if asked or (moved and blocked) or session.streaming or not (waiting or blocked):
        watch.asked_at = now
    elif _past(limits.inactivity_timeout, watch.asked_at, now):
        return INACTIVE
    return None


def _past(limit: float | None, since: float, now: float) -> bool:
    return limit is not None and now - since >= limit
