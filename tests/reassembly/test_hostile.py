"""What a producer might send to harm: no crash, no memory above the budget, no time without end."""

from __future__ import annotations

import ctypes
import gc
import os
import random
import subprocess
import sys
import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from datastreamer.reassembly import Dropped, Malformed, PayloadComplete, Reassembler
from tests.reassembly.generated import name, records

U32 = 2**32 - 1


@given(st.lists(st.tuples(st.binary(max_size=80), st.binary(max_size=120)), max_size=30))
@settings(max_examples=300, deadline=None)
def test_any_bytes(messages: list[tuple[bytes, bytes]]) -> None:
    reassembler = Reassembler(budget=10_000)
    for key, value in messages:
        reassembler.receive(key, value)
        # The same as something that looks better.
        reassembler.receive(key[:1] + key.ljust(33, b"\1")[1:], value)
        assert reassembler.stats().used <= 10_000 + 144 * reassembler.known_count


def test_absurd_counts_cost_nothing() -> None:
    reassembler = Reassembler()
    prefixes = [name(1, b"%d" % at) for at in range(28_000)]
    reassembler.receive(name(0), records(*((prefix, U32) for prefix in prefixes)))
    stats = reassembler.stats()
    assert stats.used == 144 * (1 + len(prefixes))
    (event,) = reassembler.expire(1e9)
    assert isinstance(event, Dropped)
    assert event.missing == U32 * len(prefixes)
    assert reassembler.stats().used == 0


def test_headers_that_announce_each_other() -> None:
    one, other = name(0xFF, b"1"), name(0xFF, b"2")
    reassembler = Reassembler()
    assert reassembler.receive(one, records((other, 1))) == ()
    assert reassembler.receive(other, records((one, 1))) == ()
    # Found by one of them at last: the circle is as long as it is, and never whole.
    (event,) = reassembler.receive(name(0), records((one, 2)))
    assert type(event).__name__ == "Conflict"
    assert reassembler.stats().in_flight == 1
    assert reassembler.stats().messages == 2
    # One that announces itself.
    reassembler = Reassembler()
    reassembler.receive(one, records((one, 1)))
    (event,) = reassembler.receive(name(0), records((one, 1)))
    assert isinstance(event, PayloadComplete)
    assert event.parts == []


def test_a_long_chain_of_headers_takes_no_stack() -> None:
    reassembler = Reassembler()
    depth = 200_000
    for at in range(depth):
        reassembler.receive(name(0xFF, b"%d" % at), records((name(0xFF, b"%d" % (at + 1)), 1)))
    reassembler.receive(name(0xFF, b"%d" % depth), b"")
    (event,) = reassembler.receive(name(0), records((name(0xFF, b"0"), 1)))
    assert isinstance(event, PayloadComplete)


def test_a_flood_of_unknown_prefixes_stays_in_the_budget() -> None:
    reassembler = Reassembler(budget=1_000_000)
    dropped = 0
    for number in range(50_000):
        events = reassembler.receive(name(1, b"%d" % number), bytes(number % 500), "a", number)
        dropped += len(events)
        assert all(isinstance(event, Dropped) for event in events)
    stats = reassembler.stats()
    assert stats.used <= 1_000_000
    assert stats.in_flight == 50_000 - dropped == stats.messages
    assert reassembler.positions().get("a") == dropped


def test_a_key_of_some_length_is_named_in_part() -> None:
    (event,) = Reassembler().receive(b"\0" * 1_000_000, b"")
    assert isinstance(event, Malformed)
    assert len(event.key) == 1024


# What it costs, by the system's account. A process of its own: what was freed before does not
# count, and nothing else of the test run does.

MEASURE = """
import ctypes, gc, os, sys

def resident():
    gc.collect()
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

from datastreamer.reassembly import Reassembler, pack_records

count = int(sys.argv[2])

def spread(number):
    # Every message has a prefix of its own, that no header has announced: the worst case.
    yield b"\\1%32d" % number, value

def crowded(number):
    yield b"\\1".ljust(33, b".") + b"%07d" % number, value

def announced(number):
    # A thousand payloads of a thousand messages each, one of them missing.
    id = b"%32d" % (number // 1000)
    if number % 1000 == 0:
        yield b"\\0" + id, pack_records([(b"\\1" + id, 1000)])
    else:
        yield b"\\1" + id + b"%04d" % (number % 1000), value

def small(number):
    # Payloads of two messages, of which one is there.
    id = b"%32d" % (number // 2)
    if number % 2:
        yield b"\\1" + id, value
    else:
        yield b"\\0" + id, pack_records([(b"\\1" + id, 2)])

shape = locals()[sys.argv[1]]
value = bytes(200)
reassembler = Reassembler(budget=1 << 40)
before = resident()
own = 0
for number in range(count):
    for key, value_ in shape(number):
        own += len(key) + len(value_)
        reassembler.receive(key, value_, "a", number)
peak = resident() - before
used = reassembler.stats().used
print((peak - own) / count, (used - own) / count)
reassembler.expire(1e9)
assert reassembler.stats().used == 0
# What malloc keeps after it was freed is not counted.
ctypes.CDLL(None).malloc_trim(0)
print((resident() - before) / count)
"""


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="asks glibc and Linux")
@pytest.mark.skipif("LD_PRELOAD" in os.environ, reason="a sanitizer's memory is another")
@pytest.mark.parametrize("count", [250_000, pytest.param(1_000_000, marks=pytest.mark.soak)])
@pytest.mark.parametrize("shape", ["spread", "crowded", "announced", "small"])
def test_a_message_costs_at_most_200_bytes(shape: str, count: int) -> None:
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, shape, str(count)],
        check=True,
        capture_output=True,
        text=True,
        timeout=300,
    )
    over, charged, left = map(float, done.stdout.split())
    print(
        f"{shape}: {over:.0f} bytes a message over its own, {charged:.0f} charged, {left:.0f} kept"
    )
    assert over <= 200
    # The budget is true: what is charged is what is taken, or more.
    assert over <= charged
    # And all of it is given back.
    assert left <= 20


def test_the_hash_is_the_process_s_own() -> None:
    """Keys that collide cannot be made beforehand: insertions in another process's order of
    collisions take no longer than any."""
    gc.collect()

    def seconds(keys: list[bytes]) -> float:
        reassembler = Reassembler()
        begin = time.perf_counter()
        for key in keys:
            reassembler.receive(key, b"")
        return time.perf_counter() - begin

    count = 50_000
    alike: Any = [name(1) + at.to_bytes(8, "big") for at in range(count)]
    strided = [name(1) + (at << 40).to_bytes(8, "big") for at in range(count)]
    chance = random.Random(1)
    any_ = [name(1) + chance.randbytes(8) for _ in range(count)]
    usual = min(seconds(any_) for _ in range(3))
    assert min(seconds(alike) for _ in range(3)) < 100 * usual
    assert min(seconds(strided) for _ in range(3)) < 100 * usual
