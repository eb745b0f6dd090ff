"""The core's events of a list of messages, to be compared with Spark's."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from hypothesis import HealthCheck, Phase, given, settings

from datastreamer.format import U32_MAX
from datastreamer.reassembly import Reassembler
from datastreamer.spark.reassembly.event_rows import row_of
from tests.reassembly.generated import deliveries, name, records

Message = tuple[bytes, bytes, str, int | None]


def placed(made: Iterable[Any]) -> list[Message]:
    """Deliveries as rows: key, value, source, position."""
    return [(key, value, source, position) for (key, value), source, position, _ in made]


def in_order(messages: Iterable[Message]) -> list[Message]:
    """As Spark brings them into order: nothing before anything."""
    return sorted(
        messages, key=lambda one: (one[3] is not None, one[3] or 0, one[2], one[0], one[1])
    )


def followed(key: bytes, subscribe: Any) -> bool:
    """Whether a message is brought before the core."""
    return (
        subscribe is None
        or key[:1] == b"\0"
        or len(key) < 33
        or any(key.startswith(prefix[:33]) for prefix in subscribe)
    )


def core_events(messages: Iterable[Message], subscribe: Any = None) -> list[tuple[Any, ...]]:
    """The rows of a core with memory without end, also of what is unfinished at the end."""
    core = Reassembler(subscribe, reorg_threshold=U32_MAX, max_age=0.5, budget=1 << 40)
    rows = [row_of(event) for message in messages for event in core.receive(*message)]
    return rows + [row_of(event, ended=True) for event in core.expire(1.0)]


def plain(rows: Iterable[Any]) -> list[str]:
    """Rows in an order of their own, to be compared: what is in words and what is binary alike."""
    return sorted(repr(_plain(tuple(row))) for row in rows)


def _plain(value: Any) -> Any:
    if isinstance(value, bytes | bytearray):
        return bytes(value)
    if isinstance(value, dict):
        return sorted(value.items())
    if isinstance(value, list | tuple):
        return tuple(_plain(one) for one in value)
    return value


def examples(count: int) -> list[Message]:
    """What Hypothesis generates in `count` examples, one after the other: always the same. Some of
    them have names of their own, others meet."""
    found: list[Message] = []

    @given(deliveries())
    @settings(
        max_examples=count,
        derandomize=True,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    def gather(made: Any) -> None:
        gather.number += 1  # type: ignore[attr-defined]
        mark = b"%04d" % (gather.number // 4)  # type: ignore[attr-defined]
        for key, value, source, _ in placed(made):
            found.append((_named(key, mark), _announcing(value, mark), source, len(found)))

    gather.number = 0  # type: ignore[attr-defined]
    gather()
    # What chance may leave out: a prefix that two announce, and one with two counts.
    for own, announced in (("one", [1]), ("two", [1]), ("three", [2, 3])):
        what = "counted" if own == "three" else "contested"
        body = records(*((name(1, what), count) for count in announced))
        found.append((name(0, own), body, "a", len(found)))
    return found


def _named(key: bytes, mark: bytes) -> bytes:
    return key[:29] + mark + key[33:] if key[29:33] == b"...." else key


def _announcing(value: bytes, mark: bytes) -> bytes:
    if len(value) % 37:
        return value
    records = (value[at : at + 37] for at in range(0, len(value), 37))
    return b"".join(_named(record, mark) for record in records)
