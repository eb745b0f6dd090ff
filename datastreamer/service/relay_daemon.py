"""The life of a relay program, from its listeners to the signal that ends it.

For callers without an event loop, such as the command line.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import trio

from datastreamer.service import systemd
from datastreamer.service.daemon import Shutdown
from datastreamer.transport.listeners import open_listeners
from datastreamer.transport.tls_stream import reload_on_hangup

if TYPE_CHECKING:
    from datastreamer.relay.relay import Relay


def relay_until_signal(
    relay: Relay, listening: Callable[[Relay, list[tuple[str, int]]], None]
) -> str:
    """Relay until SIGINT or SIGTERM; returns the signal's name. In the main thread.

    Signals, systemd and `listening` as for `serve_until_signal`. Raises what `Relay.run` raises.
    """
    shutdown = Shutdown()

    async def main() -> None:
        async with shutdown.event_loop() as nursery:

            async def begin() -> None:
                addresses = await nursery.start(relay.run, listeners)
                listening(relay, addresses)
                systemd.notify(systemd.READY)

            if relay.tls is not None:
                await nursery.start(reload_on_hangup, relay.tls)
            # Without a file the start waits for an upstream, and a signal may arrive first.
            nursery.start_soon(begin)
            await shutdown.begun.wait()
            systemd.notify(systemd.STOPPING)
            await relay.finish()

    listeners = systemd.take_listeners() or open_listeners(*relay.listen)
    try:
        with shutdown.handling_signals():
            trio.run(main)
    finally:
        for listener in listeners:
            listener.close()
    return shutdown.name
