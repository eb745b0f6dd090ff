"""Seconds that clients, publishers and relays are given."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import trio

from datastreamer.client.blocking_client import BlockingClient
from datastreamer.client.trio_driver import connect
from datastreamer.errors import UsageError
from datastreamer.protocol.retry import Backoff, check_waits
from datastreamer.publisher.blocking_publisher import BlockingPublisher
from datastreamer.publisher.trio_publisher import connect_publisher
from datastreamer.relay.relay import Relay

NO_TIMES: list[Any] = [math.nan, math.inf, 1e300, -1, 0, "3"]


@pytest.mark.parametrize("value", NO_TIMES)
@pytest.mark.parametrize("name", ["timeout", "heartbeat", "retry_for"])
def test_what_is_no_time_is_refused(name: str, value: Any) -> None:
    if name == "retry_for" and value in (0, math.inf):
        check_waits(1, retry_for=value)
        return
    with pytest.raises(UsageError) as reported:
        check_waits(**{"timeout": 1, name: value})
    assert str(reported.value).startswith(f"{name} must be ")
    assert str(reported.value).endswith(f"at most 1e+09, not {value!r}")


@pytest.mark.parametrize("words", [{"first": "1"}, {"most": math.nan}, {"most": math.inf}])
def test_waits_between_attempts(words: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="waits must go from"):
        Backoff(**words)


async def test_before_anything_is_connected(tmp_path: Path) -> None:
    for timeout in (math.nan, 0):
        with pytest.raises(UsageError, match="timeout must be more than 0"):
            async with connect("localhost", 1, timeout=timeout):
                pass
        with pytest.raises(UsageError, match="timeout must be more than 0"):
            async with connect_publisher("localhost", 1, timeout=timeout):
                pass
        for blocking in (BlockingClient, BlockingPublisher):
            with pytest.raises(UsageError, match="timeout must be more than 0"):
                await trio.to_thread.run_sync(lambda make=blocking: make("h", 1, timeout=timeout))  # noqa: B023
        with pytest.raises(UsageError, match="timeout must be more than 0"):
            Relay([("localhost", 1)], tmp_path / "s.bin", timeout=timeout)
    for lease in (math.nan, math.inf, -1):
        with pytest.raises(UsageError, match="lease must be 0 seconds or more"):
            BlockingPublisher("localhost", 1, lease=lease)
    for words in ({"patience": math.nan}, {"look_seconds": 0.0}, {"heartbeat": -1.0}):
        with pytest.raises(UsageError, match=f"{next(iter(words))} must be"):
            Relay([("localhost", 1)], tmp_path / "s.bin", **words)  # type: ignore[arg-type]
