"""The reassembler again, of dicts: what the compiled one is compared with."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from datastreamer.reassembly._memory import CHARGES
from datastreamer.reassembly.checkpoint import Checkpoint
from datastreamer.reassembly.events import Conflict, Dropped, Event, Malformed, PayloadComplete

NODE, HOLD, MESSAGE, TAG = (CHARGES[name] for name in ("node", "hold", "message", "tag"))
FOREVER = float("inf")
UNIT = 16
OPENING = (NODE + HOLD) // UNIT


def units(size: int) -> int:
    return -(-size // UNIT)


def header_weight(value: bytes) -> int:
    return units((1 + len(value) // 37) * NODE)


def weight(key: bytes, value: bytes) -> int:
    announced = len(value) // 37 if key[0] == 0xFF else 0
    return units(len(key) + len(value) + MESSAGE + announced * NODE)


def records_of(body: bytes) -> list[tuple[bytes, int]]:
    return [
        (body[at : at + 33], int.from_bytes(body[at + 33 : at + 37], "big"))
        for at in range(0, len(body), 37)
    ]


@dataclass
class Prefix:
    key: bytes
    since: float
    serial: int
    payload: Payload | None = None
    expected: int | None = 0  # None: not known any more
    messages: dict[bytes, bytes] = field(default_factory=dict)
    holds: dict[str, int] = field(default_factory=dict)
    by: str | None = None
    lead: int = 0  # how much more of it `by` has sent than all others, in units


@dataclass
class Payload:
    id: bytes
    since: float
    serial: int
    header: bytes | None
    prefixes: list[Prefix] = field(default_factory=list)
    missing: int = 0
    holds: dict[str, int] = field(default_factory=dict)
    finished: bool = False
    by: str | None = None
    lead: int = 0


def size_of(messages: dict[bytes, bytes]) -> int:
    return sum(len(key) + len(value) for key, value in messages.items())


class Twin:
    def __init__(
        self,
        subscribe: list[bytes] | None = None,
        *,
        reorg_threshold: int = 1000,
        budget: int = 1 << 30,
        max_age: float | None = 600.0,
        resume: Checkpoint | None = None,
    ) -> None:
        self.subscribe = subscribe
        self.threshold = reorg_threshold
        self.budget = budget
        self.max_age = FOREVER if max_age is None else max_age
        self.payloads: dict[bytes, Payload] = {}
        self.prefixes: dict[bytes, Prefix] = {}
        self.flight: dict[int, Payload | Prefix] = {}  # by serial, in its order
        self.shares: dict[str, list[Payload | Prefix]] = {}  # by source
        self.finished: list[Payload] = []
        self.thinned = 0
        self.fresh = self.forgettable = 0
        self.next: dict[str, int] = {}
        self.seen: dict[str, int] = {}
        self.now = 0.0
        self.serial = self.used = 0
        self.events: list[Event] = []
        self.counts: dict[tuple[str, str], int] = {}
        if resume is not None:
            self.next = dict(resume.positions)
            self.shares = {source: [] for source in self.next}
            self.seen = dict(resume.seen)
            for own_id, prefixes in resume.known:
                payload = self.payloads[own_id] = Payload(own_id, 0.0, 0, None, finished=True)
                for key in prefixes:
                    prefix = self.prefixes[key] = Prefix(key, 0.0, 0, payload, None)
                    payload.prefixes.append(prefix)
                self.used += NODE * (1 + len(prefixes))
                self.finished.append(payload)
            self.keep_to_budget()

    # The outside.

    def receive(
        self,
        key: bytes,
        value: bytes,
        source: str = "",
        position: int | None = None,
        now: float | None = None,
    ) -> list[Event]:
        if now is not None:
            self.expire_only(now)
        self.serial += 1
        self.where: tuple[str | None, int | None] = source, position
        self.shares.setdefault(source, [])
        self.count("received")
        if position is not None:
            self.next[source] = max(self.next.get(source, 0), position + 1)
        self.take(key, value)
        self.keep_to_budget()
        return self.reported()

    def expire(self, now: float) -> list[Event]:
        self.expire_only(now)
        return self.reported()

    def position(self, source: str) -> int | None:
        if source not in self.next:
            return None
        held = [item.holds[source] for item in self.flight.values() if source in item.holds]
        return min([self.next[source], *held])

    def positions(self) -> dict[str, int]:
        return {source: self.position(source) or 0 for source in self.next}

    def known(self) -> list[tuple[bytes, tuple[bytes, ...]]]:
        return [(p.id, tuple(prefix.key for prefix in p.prefixes)) for p in self.finished]

    def checkpoint(self) -> Checkpoint:
        seen = {source: max(at, self.seen.get(source, 0)) for source, at in self.next.items()}
        return Checkpoint(self.positions(), seen, self.known())

    # One message.

    def reported(self) -> list[Event]:
        events, self.events = self.events, []
        return events

    def count(self, what: str) -> None:
        if self.where[0] is not None:
            at = (self.where[0], what)
            self.counts[at] = self.counts.get(at, 0) + 1

    def malformed(self, key: bytes) -> None:
        self.count("malformed")
        self.events.append(Malformed(key[:1024], "", *self.where))

    def conflict(self, what: Any, key: bytes, prefix: bytes, payload: Payload | None) -> None:
        self.count("conflicts")
        own_id = payload.id if payload else None
        self.events.append(Conflict(what, key[:1024], prefix, own_id, *self.where))

    def wanted(self, prefix: bytes) -> bool:
        return self.subscribe is None or any(
            prefix.startswith(wanted[:33]) for wanted in self.subscribe
        )

    def hold(self, item: Payload | Prefix, source: str | None, position: int | None) -> None:
        if source is not None and position is not None:
            if source not in item.holds:
                self.used += HOLD
            item.holds[source] = min(position, item.holds.get(source, position))

    def seen_again(self, item: Payload | Prefix) -> None:
        if isinstance(item, Payload) and item.finished:
            item.serial = self.serial
        else:
            self.hold(item, *self.where)

    def take(self, key: bytes, value: bytes) -> None:
        if len(key) < 33 or (key[0] == 0 and len(key) != 33):
            return self.malformed(key)
        if key[0] and not self.wanted(key[:33]):
            return self.count("outside")
        if key[0] in (0, 0xFF) and (
            len(value) % 37 or any(prefix[0] == 0 for prefix, _ in records_of(value))
        ):
            return self.malformed(key)
        if key[0] == 0:
            return self.take_header(key, value)
        return self.take_part(key, value)

    def take_header(self, key: bytes, value: bytes) -> None:
        payload = self.payloads.get(key[1:])
        if payload is not None:
            if payload.header not in (None, value):
                self.conflict("value", key, key, payload)
            else:
                self.count("duplicates")
                self.sent_again(payload, header_weight(value))
            return self.seen_again(payload)
        if self.refused(None, key, value):
            return None
        payload = Payload(key[1:], self.now, self.serial, value)
        self.payloads[key[1:]] = self.flight[self.serial] = payload
        self.used += NODE
        self.sent(payload, header_weight(value))
        self.hold(payload, *self.where)
        self.settle(payload, self.announce(payload, key, value))
        return None

    def take_part(self, key: bytes, value: bytes) -> None:
        prefix = self.prefixes.get(key[:33])
        if prefix is None:
            prefix = self.prefixes[key[:33]] = Prefix(key[:33], self.now, self.serial)
            self.flight[self.serial] = prefix
            self.used += NODE
        payload = prefix.payload
        late = payload is not None and payload.finished
        if late and prefix.expected is None:
            self.count("duplicates")
            return self.seen_again(payload or prefix)
        if key in prefix.messages:
            if prefix.messages[key] == value:
                self.count("duplicates")
                self.sent_again(payload or prefix, weight(key, value))
            else:
                self.conflict("value", key, key[:33], payload)
            return self.seen_again(payload or prefix)
        if payload is not None and len(prefix.messages) >= (prefix.expected or 0):
            if late:
                payload.serial = self.serial
            return self.malformed(key)
        if payload is not None and key[0] == 0xFF and self.refused(payload, key, value):
            return None
        prefix.messages[key] = value
        self.used += len(key) + len(value) + MESSAGE
        self.sent(payload or prefix, weight(key, value))
        self.hold(payload or prefix, *self.where)
        if payload is not None:
            payload.missing -= 1
            self.settle(payload, self.announce(payload, key, value) if key[0] == 0xFF else [])
        return None

    def refused(self, payload: Payload | None, key: bytes, value: bytes) -> bool:
        for name, _ in records_of(value):
            prefix = self.prefixes.get(name)
            if (
                self.wanted(name)
                and prefix is not None
                and prefix.payload is not None
                and prefix.payload is not payload
            ):
                self.conflict("prefix", key, name, prefix.payload)
                return True
        return False

    def announce(self, payload: Payload, key: bytes, value: bytes) -> list[Prefix]:
        work = []
        for name, count in records_of(value):
            prefix = self.prefixes.get(name)
            if not self.wanted(name):
                continue
            if prefix is not None and prefix.payload is not None:
                assert prefix.expected is not None
                if prefix.expected != count:
                    self.conflict("count", key, name, payload)
                payload.missing += max(0, count - prefix.expected)
                prefix.expected = max(count, prefix.expected)
                continue
            if prefix is None:
                prefix = self.prefixes[name] = Prefix(name, self.now, self.serial)
                self.used += NODE
            else:
                work.append(prefix)
                self.join(payload, prefix)
                del self.flight[prefix.serial]
                if prefix.serial < payload.serial:
                    del self.flight[payload.serial]
                    payload.since, payload.serial = prefix.since, prefix.serial
                    self.flight[payload.serial] = payload
                    self.flight = dict(sorted(self.flight.items()))
                for hold in prefix.holds.items():
                    self.hold(payload, *hold)
                    self.used -= HOLD
                prefix.holds = {}
            prefix.payload = payload
            prefix.expected = count
            payload.prefixes.append(prefix)
            payload.missing += count
        return work

    def settle(self, payload: Payload, work: list[Prefix]) -> None:
        where = self.where
        while work:
            prefix = work.pop()
            self.where = None, None
            waiting, prefix.messages = prefix.messages, {}
            for key, value in waiting.items():
                assert prefix.expected is not None
                if len(prefix.messages) >= prefix.expected:
                    self.malformed(key)
                elif key[0] != 0xFF or not self.refused(payload, key, value):
                    prefix.messages[key] = value
                    payload.missing -= 1
                    if key[0] == 0xFF:
                        work += self.announce(payload, key, value)
                    continue
                self.used -= len(key) + len(value) + MESSAGE
                self.lose(payload, weight(key, value))
        self.where = where
        if payload.missing == 0:
            self.complete(payload)

    def complete(self, payload: Payload) -> None:
        parts = sorted(
            (key, value)
            for prefix in payload.prefixes
            if prefix.key[0] != 0xFF
            for key, value in prefix.messages.items()
            if self.subscribe is None or any(key.startswith(wanted) for wanted in self.subscribe)
        )
        prefixes = tuple(prefix.key for prefix in payload.prefixes)
        assert self.where[0] is not None
        self.events.append(
            PayloadComplete(payload.id, parts, prefixes, payload.since, *self.where)  # type: ignore[arg-type]
        )
        for prefix in payload.prefixes:
            count = len(prefix.messages)
            self.used -= size_of(prefix.messages) + count * (MESSAGE - TAG)
        del self.flight[payload.serial]
        self.used -= HOLD * len(payload.holds)
        payload.holds = {}
        self.give(payload, None)
        payload.finished = True
        payload.serial = self.serial
        self.finished.append(payload)
        self.fresh += 1
        if self.fresh > self.threshold:
            self.forgettable = len(self.finished) - self.fresh
            self.fresh = 0
        self.forget()

    # Whose it is.

    def give(self, item: Payload | Prefix, by: str | None, excess: int = 0, at: int = -1) -> None:
        """It is that source's from now on: the one at place `at` of its own, or the last."""
        if item.by is not None:
            self.shares[item.by].remove(item)
        item.by, item.lead = by, 0
        if by is not None:
            item.lead = excess + OPENING
            own = self.shares[by]
            own.insert(len(own) if at < 0 else at, item)

    def sent(self, item: Payload | Prefix, weight: int) -> None:
        source, _ = self.where
        if item.by == source:
            item.lead += weight
        else:
            excess = weight - max(0, item.lead - OPENING)
            self.lose(item, weight)
            if excess > 0:
                self.give(item, source, excess)

    def sent_again(self, item: Payload | Prefix, weight: int) -> None:
        if item.by != self.where[0] and not (isinstance(item, Payload) and item.finished):
            self.lose(item, weight)

    def lose(self, item: Payload | Prefix, weight: int) -> None:
        if item.by is not None:
            item.lead -= weight
            if item.lead <= OPENING:
                self.give(item, None)

    def join(self, payload: Payload, prefix: Prefix) -> None:
        by, excess = prefix.by, prefix.lead - OPENING
        if by is None:
            return
        place = self.shares[by].index(prefix)
        self.give(prefix, None)
        before = payload.lead - OPENING
        if payload.by is None:
            self.give(payload, by, excess, place)
        elif payload.by != by:
            self.lose(payload, excess)
            if excess > before:
                self.give(payload, by, excess - before, place)
        elif prefix.serial < payload.serial:
            place -= self.shares[by].index(payload) < place
            self.give(payload, by, excess + before, place)
        else:
            payload.lead += excess

    def above_share(self) -> Payload | Prefix | None:
        own = {source: UNIT * sum(i.lead for i in items) for source, items in self.shares.items()}
        source = max(own, key=lambda source: own[source], default="")
        if len(own) < 2 or own[source] <= self.budget // (len(own) + 1):
            return None
        return self.shares[source][0]

    # What goes.

    def replaying(self) -> bool:
        return any(self.next[source] < seen for source, seen in self.seen.items())

    def forget(self) -> None:
        if self.replaying():
            return
        oldest = next(iter(self.flight), None)
        while self.forgettable:
            payload = self.finished[0]
            if oldest is not None and payload.serial >= oldest:
                return
            self.thin(payload)
            del self.finished[0], self.payloads[payload.id]
            self.thinned = max(0, self.thinned - 1)
            self.forgettable -= 1
            self.used -= NODE

    def thin(self, payload: Payload) -> None:
        for prefix in payload.prefixes:
            del self.prefixes[prefix.key]
            self.used -= NODE + TAG * len(prefix.messages)
        payload.prefixes = []

    def keep_to_budget(self) -> None:
        while self.used > self.budget + min(len(self.finished), 2 * self.threshold + 2) * NODE:
            if (above := self.above_share()) is not None:
                self.drop("budget", above)
                self.forget()
            elif self.thinned < len(self.finished):
                self.thin(self.finished[self.thinned])
                self.thinned += 1
            elif self.flight:
                self.drop("budget", next(iter(self.flight.values())))
                self.forget()
            elif self.replaying() and self.forgettable:
                self.seen = {}
                self.forget()
            else:
                break

    def expire_only(self, now: float) -> None:
        self.now = max(now, self.now)
        while self.flight:
            oldest = next(iter(self.flight.values()))
            if self.now - oldest.since <= self.max_age:
                break
            self.drop("age", oldest)

    def drop(self, why: Any, item: Payload | Prefix) -> None:
        del self.flight[item.serial]
        self.give(item, None)
        payload = item if isinstance(item, Payload) else None
        prefixes = item.prefixes if isinstance(item, Payload) else [item]
        messages = size = 0
        for prefix in prefixes:
            del self.prefixes[prefix.key]
            messages += len(prefix.messages)
            size += size_of(prefix.messages)
        self.used -= size + MESSAGE * messages + NODE * len(prefixes) + HOLD * len(item.holds)
        if payload is not None:
            del self.payloads[payload.id]
            self.used -= NODE
        self.events.append(
            Dropped(
                *(why, payload and payload.id, None if payload else prefixes[0].key),
                *(messages, size, payload and payload.missing, item.since, item.holds),
            )
        )
