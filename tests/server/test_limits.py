"""The limits' numbers, and how many clients there are descriptors for."""

from __future__ import annotations

import dataclasses
import json
import logging
import resource
from pathlib import Path

import pytest
import trio

from datastreamer.errors import UsageError
from datastreamer.server import limits as limits_module
from datastreamer.server.limits import Limits, room_for_clients
from datastreamer.server.server import Server
from datastreamer.storage.stream import DataStream


def test_the_defaults_end_no_client_for_being_slow() -> None:
    limits = Limits()
    assert limits.max_clients == 10_000
    assert limits.inactivity_timeout == 120
    assert limits.write_timeout is None
    assert limits.accept_rate is limits.request_rate is limits.max_clients_per_address is None


def test_they_travel_as_json() -> None:
    for limits in (
        Limits(),
        Limits(max_clients=3, max_clients_per_address=2, accept_rate=0.5, request_rate=7),
        Limits(inactivity_timeout=None, write_timeout=1.5, handshake_timeout=None, grace=0),
        Limits(command_timeout=3, dead_peer_timeout=None),
        Limits(reserved_clients=0, max_clients_per_address=0, client_token_file="tokens"),
        Limits(reserved_clients=5).share(0, 2),
    ):
        assert Limits(**json.loads(json.dumps(dataclasses.asdict(limits)))) == limits


def test_a_share_of_the_reserved_slots() -> None:
    assert [Limits(reserved_clients=5).share(at, 2).reserved for at in range(2)] == [3, 3]
    assert [Limits(reserved_clients=1).share(at, 3).reserved for at in range(3)] == [1, 1, 1]
    assert [Limits(reserved_clients=0).share(at, 3).reserved for at in range(3)] == [0, 0, 0]
    assert [Limits().share(at, 3).reserved for at in range(3)] == [3, 3, 3]
    assert Limits().reserved == 8


def test_nought_is_no_limit() -> None:
    names = [field.name for field in dataclasses.fields(Limits)]
    needed = (
        *("max_clients", "max_batch_count", "max_batch_bytes", "shared_by"),
        *("archive_cache", "archive_timeout"),
    )
    others = (
        *("grace", "max_clients_per_address", "reserved_clients", "client_token_file"),
        "archive_cache_dir",
    )
    optional = [name for name in names if name not in (*others, *needed)]
    assert len(optional) == 8
    limits = Limits(**dict.fromkeys(optional, 0), grace=0)
    assert [getattr(limits, name) for name in optional] == [None] * 8
    assert limits.grace == 0


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("max_clients", 0, "max_clients is a whole number from 1, not 0"),
        ("max_clients", None, "max_clients is a whole number from 1, not None"),
        ("max_clients", 2.5, "not 2.5"),
        ("max_clients", True, "not True"),
        ("max_clients_per_address", -1, "is a whole number from 0 or None, not -1"),
        ("grace", None, "grace is a number from 0, not None"),
        ("grace", -0.1, "not -0.1"),
        ("write_timeout", float("nan"), "write_timeout is a number from 0 or None, not nan"),
        ("inactivity_timeout", float("inf"), "not inf"),
        ("accept_rate", "5", "not '5'"),
    ],
)
def test_numbers_that_make_no_sense(name: str, value: object, words: str) -> None:
    with pytest.raises(UsageError) as caught:
        Limits(**{name: value})  # type: ignore[arg-type]
    assert words in str(caught.value)


class Process:
    """Limits of descriptors that are not this process's."""

    def __init__(self, soft: int, hard: int, used: int, patch: pytest.MonkeyPatch) -> None:
        self.limits = (soft, hard)
        patch.setattr(resource, "getrlimit", lambda _: self.limits)
        patch.setattr(resource, "setrlimit", self.set)
        patch.setattr(limits_module, "_open_descriptors", lambda: used)

    def set(self, what: int, limits: tuple[int, int]) -> None:
        assert what == resource.RLIMIT_NOFILE
        if limits[1] != self.limits[1] or limits[0] > limits[1] >= 0:
            raise ValueError("not allowed to raise maximum limit")
        self.limits = limits


@pytest.mark.parametrize(
    ("soft", "hard", "wanted", "room", "soft_then"),
    [
        (20_000, 20_000, 10_000, 10_000, 20_000),
        (1_024, 20_000, 10_000, 10_000, 10_116),  # raised, no farther than is needed
        (1_024, 4_096, 10_000, 3_980, 4_096),
        (1_024, 1_024, 10_000, 908, 1_024),
        (1_024, resource.RLIM_INFINITY, 10_000, 10_000, 10_116),
        (resource.RLIM_INFINITY, resource.RLIM_INFINITY, 10**6, 10**6, resource.RLIM_INFINITY),
        (30, 30, 10, 1, 30),  # one client is always tried
    ],
)
def test_room_for_clients(
    monkeypatch: pytest.MonkeyPatch, soft: int, hard: int, wanted: int, room: int, soft_then: int
) -> None:
    process = Process(soft, hard, 20, monkeypatch)
    assert room_for_clients(wanted)[0] == room
    assert process.limits == (soft_then, hard)


async def test_a_server_says_when_it_has_to_serve_fewer(
    path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    Process(256, 256, 20, monkeypatch)
    with DataStream.create(path, index="memory") as stream:
        server = Server(stream)
        async with trio.open_nursery() as nursery:
            await nursery.start(server.run, [])
            nursery.cancel_scope.cancel()
    assert server.limits.max_clients == 140
    [line] = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert line.startswith(
        "serving at most 140 clients, not 10000: this process may open 256 descriptors"
    )
