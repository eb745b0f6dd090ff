"""Numbers and keys that clients and publishers are given."""

from __future__ import annotations

from typing import Any

import pytest
import trio

from datastreamer.errors import UsageError
from datastreamer.net.blocking_publisher import BlockingPublisher
from datastreamer.net.publisher import connect_publisher


async def refuses(what: str, connect: Any, blocking: Any, **options: Any) -> None:
    """Before anything is connected."""
    for place in ("localhost", 1), ("no such host", 1):
        with pytest.raises(UsageError, match=f"^{what} is "):
            async with connect(*place, **options):
                pass
        with pytest.raises(UsageError, match=f"^{what} is "):
            await trio.to_thread.run_sync(lambda: blocking(*place, **options))  # noqa: B023


@pytest.mark.parametrize("most", [0, -1, 1.5, "16"])
async def test_publishers_that_could_let_nothing_out(most: Any) -> None:
    await refuses(
        "max_unacknowledged", connect_publisher, BlockingPublisher, max_unacknowledged=most
    )
