"""Cardinal Streams 1.0.0: translates its messages for the core, and payloads back to its blocks.

Owns the two translations, and no state: `Cardinal.translate` turns a message of that protocol
into equivalent messages for a `Reassembler`, `Cardinal.payload` turns a complete payload into a
block with its values and deletes. `CardinalReassembler` wraps a core in both. Bodies are Avro,
decoded by fastavro (extra `cardinal`).

::

    0x00 hash                 batch: block, values, deletes, counts by prefix, sub-batches
    0x01 hash batch           header of a sub-batch: how many messages it has
    0x02 hash batch index     message of a sub-batch: values and deletes
    0x03 hash key             a value
    0x04 hash key             a delete
    0x05 hash                 reorg: rewind to this block; 0x06: reorg done

A prefix of the application is text of any length, a prefix of the core has 33 bytes: it is a hash
of block and prefix, and the whole key is the suffix.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, Final

from datastreamer.errors import ExtraMissing
from datastreamer.reassembly._messages import pack_records
from datastreamer.reassembly._reassembler import Reassembler
from datastreamer.reassembly.checkpoint import Checkpoint, Stats
from datastreamer.reassembly.events import Conflict, Event, Malformed, PayloadComplete
from datastreamer.reassembly.orderer import Block

try:
    from fastavro import parse_schema, schemaless_reader
except ImportError:
    raise ExtraMissing(
        "decoding Cardinal Streams needs a package that is not installed", "cardinal"
    ) from None

BATCH, SUB_HEADER, SUB_MESSAGE, VALUE, DELETE, REORG, REORG_DONE = range(7)

_HASH: Final = 32
_NO_SUB_BATCH: Final = bytes(_HASH)
_SHOWN: Final = 1024

_FIXED: Final = {"type": "fixed", "size": _HASH}
BATCH_SCHEMA: Final[Any] = {
    "type": "record",
    "name": "batch",
    "namespace": "cloud.rivet.cardinal",
    "fields": [
        {"name": "num", "type": "long"},
        {"name": "weight", "type": "bytes"},
        {"name": "parent", "type": {**_FIXED, "name": "par"}},
        {
            "name": "updates",
            "type": {
                "type": "map",
                "values": {
                    "type": "record",
                    "name": "update",
                    "fields": [
                        {"name": "value", "type": "bytes"},
                        {"name": "count", "type": "int"},
                        {"name": "delete", "type": "boolean"},
                        {"name": "subbatch", "type": {**_FIXED, "name": "subb"}},
                    ],
                },
            },
        },
    ],
}
SUB_BATCH_SCHEMA: Final[Any] = {
    "type": "record",
    "name": "update",
    "fields": [
        {"name": "delete", "type": {"type": "array", "items": "string"}},
        {"name": "updates", "type": {"type": "map", "values": "bytes"}},
    ],
}
_BATCH: Final = parse_schema(BATCH_SCHEMA)
_SUB_BATCH: Final = parse_schema(SUB_BATCH_SCHEMA)
_INT: Final = parse_schema("int")
_LONG: Final = parse_schema("long")

_BODY: Final = 0x10
FOLLOWED: Final = tuple(bytes([first]) for first in (SUB_MESSAGE, VALUE, _BODY, 0xFF))
"""The first bytes of the keys of translated messages, other than headers."""

_OUTSIDE: Final = bytes([SUB_HEADER]) * 33

Message = tuple[bytes, bytes]


@dataclass(frozen=True, slots=True)
class CardinalPayload(PayloadComplete):
    """A complete block. `parts` are the keys that it sets and their values, in order of the keys;
    `deletes` the keys that it deletes, in order."""

    block: Block
    deletes: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class CardinalReorg:
    """A producer rewinds beyond its threshold, to the block with this number and hash. `done`: it
    has sent the whole new branch."""

    number: int
    hash: bytes
    done: bool
    source: str | None
    position: int | None


CardinalEvent = Event | CardinalReorg


class Cardinal:
    """Cardinal(prefixes): the translation for an application with these prefixes.

    `prefixes` are regular expressions that match at the start of a key; the longest match is the
    prefix under which producers count the key. Keys that none of them matches are ignored.
    """

    def __init__(self, prefixes: Iterable[str]) -> None:
        self._prefixes = [re.compile(prefix.encode()) for prefix in prefixes]

    def __reduce__(self) -> tuple[Any, ...]:
        return Cardinal, ([prefix.pattern.decode() for prefix in self._prefixes],)

    def translate(self, key: bytes, value: bytes) -> list[Message]:
        """The equivalent messages of the core; none for a key that is ignored.

        Raises `ValueError` for an invalid message. Messages of reorgs have no equivalent: use
        `reorg`.
        """
        if not key:
            raise ValueError("a key of 0 bytes")
        kind, own = key[0], key[1 : 1 + _HASH]
        sizes = {BATCH: (33, 33), SUB_HEADER: (65, 65), SUB_MESSAGE: (66, None)}
        least, most = sizes.get(kind, (33, None))
        if kind not in (BATCH, SUB_HEADER, SUB_MESSAGE, VALUE, DELETE):
            raise ValueError(f"unknown message type 0x{kind:02x}")
        if len(key) < least or (most is not None and len(key) > most):
            raise ValueError(f"a key of {len(key)} bytes in a message of type 0x{kind:02x}")
        if kind == BATCH:
            return self._batch(key, own, value)
        if kind == SUB_HEADER:
            count = _read(_INT, value)
            if count < 0:
                raise ValueError(f"a sub-batch of {count} messages")
            return [
                (
                    _name(0xFF, own, key[33:]) + key,
                    pack_records([(_name(SUB_MESSAGE, own, key[33:]), count)]),
                )
            ]
        if kind == SUB_MESSAGE:
            _read(_SUB_BATCH, value)
            return [(_name(SUB_MESSAGE, own, key[33:65]) + key, value)]
        prefix = self._prefix_of(key[33:])
        if prefix is None:
            return []
        return [(_name(VALUE, own, prefix) + key, value if kind == VALUE else b"")]

    def reorg(self, key: bytes, value: bytes) -> CardinalReorg | None:
        """The reorg of a message of that type, else None. Raises `ValueError`."""
        if key[:1] not in (bytes([REORG]), bytes([REORG_DONE])):
            return None
        if len(key) != 33:
            raise ValueError(f"a key of {len(key)} bytes in a message of type 0x{key[0]:02x}")
        return CardinalReorg(_read(_LONG, value), key[1:], key[0] == REORG_DONE, None, None)

    def payload(self, whole: PayloadComplete) -> CardinalPayload:
        """The block of a payload that the core has completed."""
        values: dict[bytes, bytes] = {}
        deletes: set[bytes] = set()
        batch: Any = None
        sub_batches: list[Any] = []
        for translated, value in whole.parts:
            key = translated[33:]
            if key[0] == BATCH:
                batch = _read(_BATCH, value)
            elif key[0] == VALUE:
                values[key[33:]] = value
            elif key[0] == DELETE:
                deletes.add(key[33:])
            else:
                sub_batches.append((key[33:], _read(_SUB_BATCH, value)))
        for path, update in batch["updates"].items():
            what = self._what(path.encode(), update)
            # The first value counts, as in the protocol: that of the batch itself.
            if what == "value":
                values[path.encode()] = update["value"]
            elif what == "delete":
                deletes.add(path.encode())
        for _, update in sorted(sub_batches, key=lambda found: found[0]):
            for path, value in update["updates"].items():
                values.setdefault(path.encode(), value)
            deletes.update(path.encode() for path in update["delete"])
        return CardinalPayload(
            whole.id,
            sorted(values.items()),
            whole.prefixes,
            whole.since,
            whole.source,
            whole.position,
            Block(batch["num"], whole.id, batch["parent"], int.from_bytes(batch["weight"], "big")),
            tuple(sorted(deletes)),
        )

    def _batch(self, key: bytes, own: bytes, value: bytes) -> list[Message]:
        batch = _read(_BATCH, value)
        # The body is a part like the others, so that it is kept, counted and compared.
        body = _name(_BODY, own, b"")
        records = [(body, 1)]
        for path, update in batch["updates"].items():
            what = self._what(path.encode(), update)
            if what == "subbatch":
                records.append((_name(0xFF, own, update["subbatch"]), 1))
            elif what == "count" and self._is_prefix(path.encode()):
                records.append((_name(VALUE, own, path.encode()), update["count"]))
        return [(key, pack_records(sorted(set(records)))), (body + key, value)]

    def _what(self, path: bytes, update: Any) -> str:
        """The kind of a record of a batch."""
        if update["count"] < 0:
            raise ValueError(f"{update['count']} messages of the prefix {path!r}")
        if update["delete"]:
            return "delete"
        if update["subbatch"] != _NO_SUB_BATCH:
            return "subbatch"
        if update["count"] or (not update["value"] and self._is_prefix(path)):
            return "count"
        return "value"

    def _prefix_of(self, path: bytes) -> bytes | None:
        found = (prefix.match(path) for prefix in self._prefixes)
        return max((match[0] for match in found if match is not None), key=len, default=None)

    def _is_prefix(self, path: bytes) -> bool:
        return self._prefix_of(path) == path


class CardinalReassembler:
    """CardinalReassembler(prefixes, *, reorg_threshold=1000, budget=1 << 30, max_age=600.0,
    resume=None): blocks of Cardinal Streams 1.0.0 from any number of producers.

    `prefixes` are those of `Cardinal`, the other arguments those of `Reassembler`. Payloads are
    reported as `CardinalPayload`, messages of reorgs as `CardinalReorg`.
    """

    def __init__(
        self,
        prefixes: Iterable[str],
        *,
        reorg_threshold: int = 1000,
        budget: int = 1 << 30,
        max_age: float | None = 600.0,
        resume: Checkpoint | None = None,
    ) -> None:
        self._cardinal = Cardinal(prefixes)
        self._core = Reassembler(
            FOLLOWED,
            reorg_threshold=reorg_threshold,
            budget=budget,
            max_age=max_age,
            resume=resume,
        )

    def receive(
        self,
        key: bytes,
        value: bytes,
        source: str = "",
        position: int | None = None,
        now: float | None = None,
    ) -> list[CardinalEvent]:
        """Process one message; returns its events, in order."""
        reorg = None
        try:
            reorg = self._cardinal.reorg(key, value)
            # The core receives something for every message, to track the source's position.
            found = [] if reorg is not None else self._cardinal.translate(key, value)
            found = found or [(_OUTSIDE, b"")]
        except ValueError as error:
            events = self._core.receive(b"", b"", source, position, now)
            return [
                replace(event, key=key[:_SHOWN], reason=str(error))
                if isinstance(event, Malformed)
                else self._translate(event)
                for event in events
            ]
        translated: list[CardinalEvent] = []
        for message in found:
            events = self._core.receive(*message, source, position, now)
            translated += [self._translate(event) for event in events]
        if reorg is not None:
            translated.append(replace(reorg, source=source, position=position))
        return translated

    def expire(self, now: float) -> list[CardinalEvent]:
        """Drop what is too old at this time."""
        return [self._translate(event) for event in self._core.expire(now)]

    def checkpoint(self) -> Checkpoint:
        """The state for a later run, valid once all events so far have been processed."""
        return self._core.checkpoint()

    def positions(self) -> dict[str, int]:
        """The position from which each source must be read again."""
        return self._core.positions()

    def stats(self) -> Stats:
        """Counts of the core's messages: a batch is two of them."""
        return self._core.stats()

    def _translate(self, event: Event) -> Event:
        if isinstance(event, PayloadComplete):
            return self._cardinal.payload(event)
        if isinstance(event, Conflict | Malformed):
            return replace(event, key=event.key[33:] or event.key)
        return event


def _name(first: int, own: bytes, what: bytes) -> bytes:
    """33 bytes that identify something of a block."""
    return bytes([first]) + hashlib.sha256(own + what).digest()


class _Body:
    """A file-like object for the Avro decoder."""

    def __init__(self, value: bytes) -> None:
        self._value = value
        self.at = 0

    def read(self, size: int) -> bytes:
        start = self.at
        self.at = min(len(self._value), start + size)
        return self._value[start : self.at]


def _read(schema: Any, value: bytes) -> Any:
    """Decode Avro, which must be the whole value. Raises `ValueError`."""
    body: Any = _Body(value)
    try:
        found = schemaless_reader(body, schema, None)
    except Exception as error:  # fastavro raises many types
        raise ValueError(f"invalid Avro: {error!r}") from error
    if body.at != len(value):
        raise ValueError(f"{len(value) - body.at} bytes after the Avro value")
    return found
