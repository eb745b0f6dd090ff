"""What the producers of a world of portions publish, and what consumers must make of it.

Each producer publishes some of the messages of every payload, each message by one of them at least:
in an order of its own, some late, some twice, some with another value after the true one, among
entries that are no messages or hold none. Of some payloads a message is never published. Knows no
stream and no consumer.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from datastreamer.reassembly import pack_message
from datastreamer.reassembly.portions import NESTED
from datastreamer.reassembly.producer import MESSAGE_TYPE
from tests.consumer.test_portions import made, own
from tests.storage.made import BOOKMARK, Item

Message = tuple[bytes, bytes]

LIE = b"another"
_OTHER = 5
# Payloads whose messages are mixed.
_MIXED = 3


@dataclass
class Script:
    """All payloads, and the messages that are due to be published by each producer."""

    chance: random.Random
    producers: Sequence[str]
    payloads: dict[bytes, list[Message]] = field(default_factory=dict)
    missing: dict[bytes, bytes] = field(default_factory=dict)
    """The key of the message of a payload that is never published."""
    owners: dict[bytes, bytes] = field(default_factory=dict)
    """The payloads of prefixes."""
    lies: set[bytes] = field(default_factory=set)
    """Keys that have two values."""
    malformed: set[bytes] = field(default_factory=set)
    _late: dict[str, list[Item]] = field(default_factory=dict)

    def next(self) -> dict[str, list[Item]]:
        """The messages of the next payloads, by producer."""
        found = self.last()
        behind: dict[str, list[Item]] = {name: [] for name in self.producers}
        for _ in range(_MIXED):
            self._add(found, behind)
        for items in found.values():
            items.extend(self.chance.choices(items, k=len(items) // 8))
            items.extend(self._noise())
            self.chance.shuffle(items)
        return {name: found[name] + behind[name] for name in found}

    def last(self) -> dict[str, list[Item]]:
        """Those that are late."""
        found, self._late = self._late, {}
        return {name: found.get(name, []) for name in self.producers}

    def _add(self, found: dict[str, list[Item]], behind: dict[str, list[Item]]) -> None:
        chance, number = self.chance, len(self.payloads)
        messages = self.payloads[own(number)] = made(chance, number)
        self.owners |= {key[:33]: own(number) for key, _ in messages}
        missing = chance.choice(messages[1:]) if len(messages) > 1 else None
        if missing is not None and chance.random() < 0.04:
            self.missing[own(number)] = missing[0]
            messages = [message for message in messages if message != missing]
        for message in messages:
            names = [name for name in self.producers if chance.random() < 0.7]
            for name in names or [chance.choice(self.producers)]:
                late = self._late if chance.random() < 0.02 else found
                late.setdefault(name, []).append(_entry(message))
        parts = [message for message in messages if not is_header(message[0])]
        if parts and own(number) not in self.missing and chance.random() < 0.2:
            key, value = chance.choice(parts)
            name = chance.choice(self.producers)
            found[name].append(_entry((key, value)))
            behind[name].append(_entry((key, LIE)))
            self.lies.add(key)
        if chance.random() < 0.1:
            key = chance.choice([b"\x01", b"\x02\x07", b"odd"]) + b"%d" % number
            found[chance.choice(self.producers)].append(_entry((key, b"")))
            self.malformed.add(key)

    def _noise(self) -> list[Item]:
        """Entries that nobody wants: sometimes many."""
        chance = self.chance
        count = chance.choice([0, 5, 5, 200])
        others = [pack_message(b"\x01" + bytes(32), chance.randbytes(4)) for _ in range(count)]
        return [(BOOKMARK, b"b%d" % len(self.payloads)), *((_OTHER, each) for each in others)]

    def again(self, items: list[Item]) -> list[Item]:
        """What was removed, in another order: what is true before what is not."""
        self.chance.shuffle(items)
        return sorted(items, key=lambda item: item[1].endswith(LIE))

    # What a consumer of these portions must find.

    def parts(self, number: bytes, subscribe: Iterable[bytes]) -> list[Message]:
        """The parts of a payload."""
        prefixes = tuple(subscribe)
        return sorted(
            message
            for message in self.payloads[number]
            if not is_header(message[0]) and message[0].startswith(prefixes)
        )

    def endless(self, subscribe: Iterable[bytes]) -> set[bytes]:
        """The payloads that lack something wanted."""
        prefixes = *subscribe, NESTED
        return {each for each, key in self.missing.items() if key.startswith(prefixes)}

    def whole(self, subscribe: Iterable[bytes]) -> set[bytes]:
        """The payloads that are complete in the end."""
        return {*self.payloads} - self.endless(subscribe)


def is_header(key: bytes) -> bool:
    return key[:1] in (b"\x00", NESTED)


def _entry(message: Message) -> Item:
    return MESSAGE_TYPE, pack_message(*message)
