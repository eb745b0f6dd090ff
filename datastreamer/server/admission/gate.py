"""Admission of connections: which get a slot, and which must prove their identity first.

Owns the slots of one server: how many are in use, by which addresses, which connection is refused
and which idle client is closed for another. Knows neither sockets nor the protocol: `server.py`
accepts connections, the session reports what a client has proven.
"""

from __future__ import annotations

import enum
import logging
from collections import Counter
from typing import Final, Protocol, TypeAlias

from datastreamer.metrics.counters import Counts
from datastreamer.server.admission.accept_balance import AcceptBalance
from datastreamer.server.admission.fair_slots import FairSlots
from datastreamer.server.limits import PROVISIONAL_CLIENTS, Limits
from datastreamer.transport.refusal_log import RefusalLog

_log = logging.getLogger(__name__)

TOO_MANY: Final = "max_clients"
TOO_MANY_OF_ADDRESS: Final = "max_clients_per_address"

NO_STREAM: Final = "no_stream"
"""The stream's file is missing."""

EVICTED: Final = "evicted"
"""Why an idle client of a full server was closed."""

IDLE_SECONDS: Final = 10.0
"""A client of a full server that neither streams nor sends commands for this long may be closed for
another."""

PROOF_SECONDS: Final = 5.0
"""Time for a connection with a provisional slot to prove its identity."""

# Of the reserved slots these are for publishers, the others also for known clients.
_PUBLISHERS: Final = 2


class TrustLevel(enum.IntEnum):
    """What a client has proven."""

    UNPROVEN = 0
    KNOWN = 1
    """It has shown a client token, or a certificate of the client CA."""
    PUBLISHER = 2
    """It may publish."""


class GatedSession(Protocol):
    """A client's session, as admission knows it."""

    place: ConnectionSlot | None
    reason: str

    def idle_since(self) -> float | None: ...

    def dismiss(self) -> None: ...

    def end(self, reason: str, words: str, *, reset: bool = True) -> None: ...


class ConnectionSlot:
    """One accepted connection, as admission sees it."""

    __slots__ = ("came_at", "held", "host", "over", "peer", "session", "short_of", "trust")

    def __init__(self, host: str, peer: str, now: float, short_of: str) -> None:
        self.host = host
        self.peer = peer
        self.came_at = now
        self.short_of = short_of
        """The limit that the connection exceeded; empty once it has a slot."""
        self.held = False
        """Whether it has a slot. Until then it is provisional: it may only prove its identity."""
        self.over = False
        """Whether it is to be closed, or has been."""
        self.trust = TrustLevel.UNPROVEN
        self.session: GatedSession | None = None
        """The session that serves it."""


Idle: TypeAlias = tuple[TrustLevel, float, GatedSession]
"""An idle client: what it has proven, since when it is idle, its session."""


class Gate:
    """Admission to one server. `limits.max_clients` fits the descriptors of the process; `reserved`
    slots come on top of it, for clients that prove their identity. `balance` has the numbers of
    the other processes that accept from the same listeners."""

    def __init__(
        self,
        limits: Limits,
        counts: Counts,
        balance: AcceptBalance | None = None,
        reserved: int = 0,
        publishing: bool = False,
    ) -> None:
        self.clients = 0
        # Clients that have been idle for `IDLE_SECONDS`; the last one is closed first.
        self._idle: list[Idle] = []
        self.refusals = RefusalLog(_log)
        self.reserved = reserved
        """Slots beyond `max_clients`."""
        self._limits = limits
        self._counts = counts
        self._by_address: Counter[str] = Counter()
        self._balance = balance
        self._for_publishers = min(_PUBLISHERS, reserved) if publishing else 0
        # Publishers that have a slot.
        self._publishers = 0
        self._provisional: FairSlots[ConnectionSlot] | None = (
            FairSlots(PROVISIONAL_CLIENTS) if reserved else None
        )

    def shrink(self, limits: Limits) -> None:
        """Before the first client: set limits that fit the descriptors."""
        self._limits = limits

    @property
    def reserved_in_use(self) -> int:
        return max(0, self.clients - self._limits.max_clients)

    @property
    def provisional(self) -> int:
        """Connections with a provisional slot."""
        return 0 if self._provisional is None else len(self._provisional)

    def note_room(self) -> None:
        """Report to the other processes how many slots are free here."""
        if self._balance is not None:
            room = max(0, self._limits.max_clients - self.clients)
            if self._idle and self._idle[-1][0] is TrustLevel.UNPROVEN:
                room += 1  # an idle client can be closed for another
            beyond = self._limits.max_clients + self.reserved - self.clients
            self._balance.note(self.clients, room, max(0, beyond))

    def close(self) -> None:
        """No more connections are accepted here: the other processes stop waiting for this one."""
        if self._balance is not None:
            self._balance.leave()
            self._balance = None

    # Arrival.

    def refuse_without_stream(self) -> None:
        """Count a connection that is closed because the stream's file is missing."""
        self._counts.refused[NO_STREAM] += 1

    def admit(self, host: str, peer: str, now: float) -> ConnectionSlot | None:
        """A slot for a connection from `host`, provisional if the server is full; None: refused. It
        counts until `leave`. `peer` names it in the log; `now` is the loop's time."""
        short_of = self._short_of(host, now)
        place = ConnectionSlot(host, peer, now, short_of)
        if not short_of:
            self._occupy(place)
        elif self._provisional is None:
            self._refuse(place, now)
            return None
        else:
            displaced = self._provisional.add(place, host)
            if displaced is not None:
                self._dismiss(displaced, now)
        return place

    def _short_of(self, host: str, now: float) -> str:
        """The limit that one more client of `host` exceeds; "" if there is a slot. Closes an idle
        client if that makes one free."""
        most = self._limits.most_of(host)
        if most is not None:
            elsewhere = 0 if self._balance is None else self._balance.elsewhere(host)
            if self._by_address[host] + elsewhere >= most:
                return TOO_MANY_OF_ADDRESS
        if self.clients < self._limits.max_clients or self._evict(TrustLevel.UNPROVEN, now):
            return ""
        return TOO_MANY

    def _occupy(self, place: ConnectionSlot) -> None:
        place.held, place.short_of = True, ""
        self.clients += 1
        self._publishers += place.trust is TrustLevel.PUBLISHER
        self._counts.accepted += 1
        self._note(place.host, +1)
        self.note_room()

    # Proof.

    def prove(self, place: ConnectionSlot, trust: TrustLevel, now: float) -> bool:
        """The client has proven its identity; returns whether it has a slot now."""
        before, place.trust = place.trust, max(place.trust, trust)
        if place.held:
            publishes = place.trust is TrustLevel.PUBLISHER
            self._publishers += publishes and before is not TrustLevel.PUBLISHER
        if place.held or place.over:
            return place.held
        most = self._limits.max_clients + self.reserved
        if trust is not TrustLevel.PUBLISHER:
            most -= max(0, self._for_publishers - self._publishers)
        if self.clients >= most and not self._evict(trust, now):
            self._dismiss(place, now)
            return False
        self._promote(place)
        return True

    def confirm(self, place: ConnectionSlot, now: float) -> bool:
        """The client sent a command without proving its identity; returns whether it has a slot
        now, which may have become free since it connected."""
        if not place.held and not place.over:
            place.short_of = self._short_of(place.host, now)
            if place.short_of:
                self._dismiss(place, now)
            else:
                self._promote(place)
        return place.held

    def _promote(self, place: ConnectionSlot) -> None:
        assert self._provisional is not None
        self._provisional.discard(place, place.host)
        self._occupy(place)

    # The end.

    def leave(self, place: ConnectionSlot, now: float) -> None:
        """The connection ended. A second call does nothing."""
        if place.over:
            return
        place.over = True
        if place.held:
            place.held = False
            self.clients -= 1
            self._publishers -= place.trust is TrustLevel.PUBLISHER
            self._note(place.host, -1)
            self.note_room()
        else:
            assert self._provisional is not None
            self._provisional.discard(place, place.host)
            self._refuse(place, now)

    def _dismiss(self, place: ConnectionSlot, now: float) -> None:
        """Close a connection with a provisional slot."""
        self.leave(place, now)
        if place.session is not None:
            place.session.dismiss()

    def _evict(self, newcomer: TrustLevel, now: float) -> bool:
        """Close the longest idle client among those that have proven least, if that is no more than
        `newcomer` has; returns whether there was one."""
        while self._idle and self._idle[-1][0] <= newcomer:
            _, since, session = self._idle.pop()
            place = session.place
            if place is None or not place.held or session.idle_since() != since:
                continue
            words = f"closed for another client after {now - since:.0f} s without a request"
            self.refusals.note(EVICTED, place.peer, words, now)
            session.reason = EVICTED
            self.leave(place, now)
            session.end(EVICTED, "", reset=False)
            return True
        return False

    @property
    def crowded(self) -> bool:
        """Whether idle clients may have to be closed soon."""
        return 10 * self.clients >= 9 * self._limits.max_clients

    def note_idle(self, clients: list[Idle]) -> None:
        """These clients have been idle for `IDLE_SECONDS`: `timeouts.py` reports them once a second
        while the server is `crowded`."""
        self._idle = sorted(clients, key=lambda client: client[:2], reverse=True)
        self.note_room()

    # The clock.

    def tick(self, now: float) -> None:
        """About once a second: close connections without proof in time, write due log lines."""
        if self._provisional is not None:
            for place in list(self._provisional):
                if now - place.came_at >= PROOF_SECONDS:
                    self._dismiss(place, now)
        self.refusals.flush(now)
        self.note_room()

    # Within.

    def _note(self, host: str, step: int) -> None:
        if self._limits.most_of(host) is None:
            return
        self._by_address[host] += step
        count = self._by_address[host]
        if self._balance is not None:
            self._balance.note_address(host, count)
        if not count:
            del self._by_address[host]

    def _refuse(self, place: ConnectionSlot, now: float) -> None:
        self._counts.refused[place.short_of] += 1
        if place.short_of == TOO_MANY:
            shared = self._limits.shared_by > 1
            limit = "this process's share of the limit" if shared else "the limit"
            words = f"refused: {_clients(self._limits.max_clients)} connected, which is {limit}"
        else:
            most = self._limits.most_of(place.host)
            words = f"refused: {most} clients of its address are connected, which is the limit"
        self.refusals.note(place.short_of, place.peer, words, now, logging.WARNING)


def _clients(number: int) -> str:
    return "1 client is" if number == 1 else f"{number} clients are"


class Pace:
    """A rate limit: `rate` steps a second, with bursts of up to one second's steps."""

    __slots__ = ("_credit", "_rate", "_since")

    def __init__(self, rate: float, now: float) -> None:
        self._rate = rate
        self._credit = max(1.0, rate)
        self._since = now

    def step(self, now: float) -> float:
        """Seconds to wait before the next step."""
        credit = self._credit + (now - self._since) * self._rate
        self._since = now
        self._credit = min(credit, max(1.0, self._rate)) - 1
        return max(0.0, -self._credit / self._rate)
