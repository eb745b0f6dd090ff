"""Relays as programs: from the first listener to the signal that ends them.

For callers that know no event loop, the command line above all.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import trio

from datastreamer.service import systemd
from datastreamer.service.daemon import Shutdown, show_life
from datastreamer.transport.listeners import open_listeners
from datastreamer.transport.tls_stream import reload_on_hangup

if TYPE_CHECKING:
    from datastreamer.relay.relay import Relay


def relay_until_signal(
    relay: Relay, listening: Callable[[Relay, list[tuple[str, int]]], None]
) -> str:
    """Relay until SIGINT or SIGTERM; gives the signal's name. In the main thread.

    Signals, systemd and `listening` as `serve_until_signal` has them. Raises what `Relay.run`
    raises.
    """
    ending = Shutdown()

    async def main() -> None:
        async with trio.open_nursery() as nursery:
            ending.enter_loop(nursery.cancel_scope)

            async def begin() -> None:
                addresses = await nursery.start(relay.run, listeners)
                listening(relay, addresses)
                systemd.notify(systemd.READY)

            if relay.tls is not None:
                await nursery.start(reload_on_hangup, relay.tls)
            seconds = systemd.watchdog_seconds()
            if seconds is not None:
                nursery.start_soon(show_life, seconds)
            # Without a file it takes an upstream to begin, and a signal may come first.
            nursery.start_soon(begin)
            await ending.begun.wait()
            systemd.notify(systemd.STOPPING)
            await relay.finish()
            nursery.cancel_scope.cancel()

    listeners = systemd.take_listeners() or open_listeners(*relay.listen)
    try:
        with ending.noted():
            trio.run(main)
    finally:
        for listener in listeners:
            listener.close()
    return ending.name
