"""Generated payloads as Hypothesis strategies, cut into messages, and their events."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hypothesis import strategies as st

Message = tuple[bytes, bytes]


def name(start: int, text: bytes | str = b"") -> bytes:
    """33 bytes: the first one, and the rest made of a text."""
    reported = text.encode() if isinstance(text, str) else text
    return bytes([start]) + reported.ljust(32, b".")


def records(*announced: tuple[bytes, int]) -> bytes:
    return b"".join(prefix + count.to_bytes(4, "big") for prefix, count in announced)


@dataclass(frozen=True)
class Made:
    """A payload: its id, its messages (the header first) and its parts in order."""

    id: bytes
    messages: list[Message]
    parts: list[Message]


@st.composite
def payloads(draw: st.DrawFn, number: int, depth: int = 3) -> Made:
    """A payload whose headers are nested up to `depth` times."""
    messages: list[Message] = []
    parts: list[Message] = []
    names = iter(range(256))

    def part_prefix() -> tuple[bytes, int]:
        prefix = name(draw(st.sampled_from([1, 2, 0xFE])), b"%d,%d" % (number, next(names)))
        suffixes = draw(st.sets(st.binary(max_size=3), max_size=12))
        made = [(prefix + suffix, draw(st.binary(max_size=4))) for suffix in sorted(suffixes)]
        messages.extend(made)
        parts.extend(made)
        return prefix, len(made)

    def header(left: int) -> bytes:
        reported = [part_prefix() for _ in range(draw(st.integers(0, 2)))]
        for _ in range(draw(st.integers(0, 2)) if left else 0):
            prefix = name(0xFF, b"%d,%d" % (number, next(names)))
            suffixes = draw(st.sets(st.binary(max_size=2), max_size=3))
            messages.extend([(prefix + suffix, header(left - 1)) for suffix in sorted(suffixes)])
            reported.append((prefix, len(suffixes)))
        return records(*reported)

    own_id = b"payload %d" % number
    head = name(0, own_id), header(draw(st.integers(0, depth)))
    return Made(head[0][1:], [head, *messages], sorted(parts))


@st.composite
def worlds(draw: st.DrawFn, most: int = 5) -> list[Made]:
    return [draw(payloads(number)) for number in range(draw(st.integers(1, most)))]


@st.composite
def soups(draw: st.DrawFn) -> list[Message]:
    """Messages without sense, of so few names that everything meets everything."""
    ids = [b"a", b"b", b"c"]
    prefixes = [name(first, own_id) for first in (1, 2, 0xFF) for own_id in ids]
    announced = st.tuples(
        st.sampled_from([*prefixes, name(0, b"a")] if draw(st.booleans()) else prefixes),
        st.sampled_from([0, 1, 1, 2, 3, 2**32 - 1]),
    )
    bodies = st.lists(announced, max_size=4).map(lambda reported: records(*reported))
    wrong = st.binary(max_size=40)
    headers = st.tuples(st.sampled_from(ids).map(lambda own_id: name(0, own_id)), bodies)
    nested = st.tuples(
        st.builds(
            lambda prefix, suffix: prefix + suffix,
            st.sampled_from([name(0xFF, own_id) for own_id in ids]),
            st.binary(max_size=1),
        ),
        bodies,
    )
    parts = st.tuples(
        st.builds(
            lambda prefix, suffix: prefix + suffix,
            st.sampled_from(prefixes[:6]),
            st.sampled_from([b"", b"0", b"1", b"2"]),
        ),
        st.sampled_from([b"", b"x", b"y"]),
    )
    odd = st.tuples(
        st.one_of(wrong, st.sampled_from([name(0, b"a"), name(0xFF, b"a"), name(0, b"a") + b"x"])),
        wrong,
    )
    message = st.one_of(headers, nested, parts, parts, parts, odd)
    return draw(st.lists(message, max_size=40))


@st.composite
def deliveries(draw: st.DrawFn) -> list[tuple[Message, str, int | None, float | None]]:
    """Messages in any order, some twice, changed, or lost, from several sources."""
    if draw(st.booleans()):
        messages = draw(soups())
    else:
        messages = [message for made in draw(worlds()) for message in made.messages]
        messages += draw(st.lists(st.sampled_from(messages), max_size=10))
        messages = draw(st.permutations(messages))
        messages = messages[draw(st.integers(0, 3)) :]
        for _ in range(draw(st.integers(0, 3))):
            at = draw(st.integers(0, max(0, len(messages) - 1)))
            key, _ = messages[at : at + 1][0] if messages else (b"", b"")
            messages.insert(at, (key, draw(st.sampled_from([b"", b"lie", b"1" * 37]))))
    placed = draw(st.booleans())
    timed = draw(st.booleans())
    positions = {"a": 0, "b": 100, "c": 0}
    now = 0.0
    found = []
    for message in messages:
        source = draw(st.sampled_from("aabc"))
        position: int | None = positions[source]
        positions[source] += draw(st.sampled_from([1, 1, 1, 5, -3 if positions[source] > 3 else 1]))
        now += draw(st.sampled_from([0.0, 0.0, 1.0, 4.0]))
        without = source == "b" and draw(st.booleans())
        found.append(
            (message, source, position if placed and not without else None, now if timed else None)
        )
    return found


# A subscription: everything, or some prefixes, one of them longer than any prefix.
subscriptions: st.SearchStrategy[Any] = st.one_of(
    st.none(),
    st.lists(
        st.sampled_from(
            [b"", b"\x01", b"\x02", b"\xff", b"\x01a", name(1, b"a"), name(1, b"b") + b"1", b"\xfe"]
        ),
        max_size=3,
    ),
)
