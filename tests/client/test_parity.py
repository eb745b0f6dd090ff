"""Both interfaces of one engine offer the same names, options, types, errors and documentation.

The blocking ones are made from the asynchronous ones, but for the relay's.
"""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import datastreamer
from datastreamer import aio, errors
from datastreamer.client import async_client, blocking_client
from datastreamer.consumer import async_reassembly, blocking_reassembly
from datastreamer.publisher import async_publisher, blocking_publisher


class Pair(NamedTuple):
    asynchronous: type
    blocking: type
    # Members of one of them alone.
    only_asynchronous: frozenset[str] = frozenset()
    only_blocking: frozenset[str] = frozenset()
    # A connector makes the asynchronous one, and its block closes it.
    connected: bool = False
    # Method of the asynchronous class -> of the blocking class.
    names: tuple[tuple[str, str], ...] = (("aclose", "close"),)


CLOSE = frozenset({"close"})
PAIRS = [
    Pair(
        async_reassembly.Reassembly,
        blocking_reassembly.BlockingReassembly,
        only_blocking=CLOSE,
        connected=True,
    ),
    Pair(
        async_publisher.Publisher,
        blocking_publisher.BlockingPublisher,
        only_blocking=CLOSE,
        connected=True,
    ),
    Pair(async_publisher.PublishedOp, blocking_publisher.BlockingOp),
    Pair(async_publisher.PendingReceipt, blocking_publisher.BlockingReceipt),
    Pair(async_client.Client, blocking_client.BlockingClient, connected=True),
    Pair(
        async_client.Batches,
        blocking_client.BlockingBatches,
    ),
    Pair(async_client.Entries, blocking_client.BlockingEntries),
    Pair(
        datastreamer.Relay,
        datastreamer.BlockingRelay,
        # A blocking relay runs from its constructor on, and no condition is evaluated in its loop.
        only_asynchronous=frozenset({"run", "until"}),
        connected=True,
        names=(("finish", "close"),),
    ),
]
FUNCTIONS = [
    (datastreamer.reassemble, aio.reassemble),
    (datastreamer.reassemble, datastreamer.BlockingReassembly),
    (datastreamer.connect_publisher, aio.connect_publisher),
    (datastreamer.connect_publisher, datastreamer.BlockingPublisher),
    (datastreamer.connect, aio.connect),
    (datastreamer.connect, datastreamer.BlockingClient),
    (datastreamer.Relay, datastreamer.BlockingRelay),
]
# The names of the blocking classes in annotations, and what corresponds to them.
TYPES = {pair.blocking.__name__: pair.asynchronous.__name__ for pair in PAIRS}
PROTOCOLS = [("__aenter__", "__enter__"), ("__aexit__", "__exit__")]
ITERATION = [("__aiter__", "__iter__"), ("__anext__", "__next__")]

pairs = pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: pair.blocking.__name__)
functions = pytest.mark.parametrize("one, other", FUNCTIONS)


def public(owner: type, names: tuple[tuple[str, str], ...] = ()) -> dict[str, Any]:
    """The public members, by their names in blocking code."""
    found = {name: getattr(owner, name) for name in dir(owner) if not name.startswith("_")}
    return {dict(names).get(name, name): member for name, member in found.items()}


def common(pair: Pair) -> list[tuple[str, Any, Any]]:
    asynchronous, blocking = public(pair.asynchronous, pair.names), public(pair.blocking)
    return [(name, asynchronous[name], blocking[name]) for name in {*asynchronous} & {*blocking}]


def parameters(function: Callable[..., Any]) -> list[tuple[str, Any, Any, str]]:
    found = inspect.signature(function).parameters.values()
    return [(one.name, one.kind, one.default, type_name(one.annotation)) for one in found]


def returned(member: Any) -> str:
    function = member.fget if isinstance(member, property) else member
    return type_name(inspect.signature(function).return_annotation)


def type_name(annotation: object) -> str:
    return re.sub(r"\w+", lambda found: TYPES.get(found[0], found[0]), str(annotation))


def named_errors(member: object) -> set[str]:
    """The exceptions that a docstring names."""
    return set(re.findall(r"`(\w+)`", inspect.getdoc(member) or "")) & set(errors.__all__)


def test_the_blocking_faces_are_as_they_are_made() -> None:
    script = Path(__file__).resolve().parents[2] / ".ci" / "blocking.py"
    subprocess.run([sys.executable, script, "--check"], check=True, timeout=120)


@pairs
def test_the_same_members(pair: Pair) -> None:
    asynchronous, blocking = public(pair.asynchronous, pair.names), public(pair.blocking)
    assert set(asynchronous) - set(blocking) == pair.only_asynchronous
    assert set(blocking) - set(asynchronous) == pair.only_blocking
    for name, theirs, ours in common(pair):
        assert callable(ours) == callable(theirs), name
        if callable(ours):
            assert parameters(ours) == parameters(theirs), name
        if callable(ours) or isinstance(ours, property):
            assert returned(ours) == returned(theirs), name
        assert inspect.getdoc(ours), name


@pairs
def test_the_same_blocks_and_iterations(pair: Pair) -> None:
    for theirs, ours in PROTOCOLS:
        expected = pair.connected or hasattr(pair.asynchronous, theirs)
        assert hasattr(pair.blocking, ours) == expected, ours
    for theirs, ours in ITERATION:
        assert hasattr(pair.blocking, ours) == hasattr(pair.asynchronous, theirs), ours
    for theirs, ours in [PROTOCOLS[0], *ITERATION]:
        if hasattr(pair.asynchronous, theirs) and hasattr(pair.blocking, ours):
            found = [getattr(pair.asynchronous, theirs), getattr(pair.blocking, ours)]
            assert returned(found[0]) == returned(found[1]), ours


@functions
def test_the_same_options(one: Callable[..., Any], other: Callable[..., Any]) -> None:
    assert parameters(one) == parameters(other)


@functions
def test_the_options_are_documented(one: Callable[..., Any], other: Callable[..., Any]) -> None:
    """By the first, to which a blocking class refers; neither raises what the first does not."""
    text = inspect.getdoc(one) or ""
    referred = re.findall(r"those of\s+`(\w+)`", text)
    documented = text + "".join(inspect.getdoc(getattr(datastreamer, it)) or "" for it in referred)
    words = set(re.findall(r"`+(\w+)", documented))
    assert {name for name, *_ in parameters(one)} - words == set()
    if inspect.isclass(other):
        name = next(it for it in datastreamer.__all__ if getattr(datastreamer, it) is one)
        assert f"`{name}`" in (inspect.getdoc(other) or "")
        # A relay's `run`, which its blocking constructor includes, and the paired class.
        also = [
            getattr(one, "run", one),
            *(it.asynchronous for it in PAIRS if it.blocking is other),
        ]
        assert named_errors(other) <= named_errors(one).union(*map(named_errors, also))
    else:
        assert inspect.getdoc(other) == text


@pairs
def test_the_documentation_is_alike(pair: Pair) -> None:
    """The first sentence, `async` words aside, and the errors: of the docstring referred to too."""
    for name, theirs, ours in common(pair):
        assert _sentence(theirs) == _sentence(ours), name
        reference = f"see `{pair.asynchronous.__name__}.{name}`"
        if reference not in " ".join((inspect.getdoc(ours) or "").split()):
            assert named_errors(theirs) == named_errors(ours), name


def _sentence(member: object) -> str:
    text = " ".join((inspect.getdoc(member) or "").split())
    for words in (" (and await what it returns, if it can be)", "async "):
        text = text.replace(words, "")
    return text.partition(". ")[0].partition(": ")[0].rstrip(".")
