"""Every face of one engine offers the same: names, parameters, defaults, documentation."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest

import datastreamer
from datastreamer import aio
from datastreamer.client import async_client, blocking_client
from datastreamer.consumer import async_reassembly, blocking_reassembly
from datastreamer.publisher import async_publisher, blocking_publisher

PAIRS = [
    (async_reassembly.Reassembly, blocking_reassembly.BlockingReassembly),
    (async_publisher.Publisher, blocking_publisher.BlockingPublisher),
    (async_publisher.PublishedOp, blocking_publisher.BlockingOp),
    (async_publisher.PendingReceipt, blocking_publisher.BlockingReceipt),
    (async_client.Client, blocking_client.BlockingClient),
    (async_client.Batches, blocking_client.BlockingBatches),
    (async_client.Entries, blocking_client.BlockingEntries),
    (datastreamer.Relay, datastreamer.BlockingRelay),
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
# What one face alone has, and why.
ONLY_ASYNCHRONOUS = {
    "pour",  # a thread of Trio's
    "run",  # a relay's; a blocking one runs from its constructor on
    "until",  # a relay's; its condition is evaluated in the event loop
}
ONLY_BLOCKING = {
    "close",  # a publisher's and a reassembly's, whose asynchronous ones end with their blocks
}
NAMES = {"aclose": "close", "finish": "close"}


def public(owner: type) -> dict[str, Any]:
    """The public members, by their names in blocking code."""
    found = {name: getattr(owner, name) for name in dir(owner) if not name.startswith("_")}
    return {NAMES.get(name, name): member for name, member in found.items()}


def parameters(function: Callable[..., Any]) -> list[tuple[str, Any, Any]]:
    found = inspect.signature(function).parameters.values()
    return [(one.name, one.kind, one.default) for one in found]


@pytest.mark.parametrize("asynchronous, blocking", PAIRS)
def test_the_same_members(asynchronous: type, blocking: type) -> None:
    theirs, ours = public(asynchronous), public(blocking)
    assert set(theirs) - set(ours) <= ONLY_ASYNCHRONOUS
    assert set(ours) - set(theirs) <= ONLY_BLOCKING
    for name, member in ours.items():
        if name not in theirs:
            continue
        assert callable(member) == callable(theirs[name]), name
        if callable(member):
            assert parameters(member) == parameters(theirs[name]), name
        assert inspect.getdoc(member), name


@pytest.mark.parametrize("one, other", FUNCTIONS)
def test_the_same_options(one: Callable[..., Any], other: Callable[..., Any]) -> None:
    assert parameters(one) == parameters(other)


@pytest.mark.parametrize("asynchronous, blocking", PAIRS)
def test_the_documentation_begins_alike(asynchronous: type, blocking: type) -> None:
    """The first sentence is the contract in short; `async` words aside."""
    theirs, ours = public(asynchronous), public(blocking)
    for name in set(ours) & set(theirs):
        first, other = (inspect.getdoc(each[name]) or "" for each in (theirs, ours))
        assert _sentence(first) == _sentence(other), name


def _sentence(text: str) -> str:
    text = " ".join(text.split())
    for words in (" (and await what it returns, if it can be)", "async "):
        text = text.replace(words, "")
    return text.partition(". ")[0].partition(": ")[0].rstrip(".")
