"""The serving process of a `StreamServer`: ``python -m datastreamer.net.child ORDER``.

Follows the file on a descriptor that it was given, serves on listeners that it was
given, and ends with its parent. The control socket carries its readiness, and the
parent's wishes: d(rain) and q(uit), each with a u32 of milliseconds.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import socket
import sys
from typing import Any

import trio

from datastreamer.net.server import Server
from datastreamer.storage.stream import DataStream

_REQUEST_SIZE = 5


async def _obey(control: trio.SocketStream, server: Server, scope: trio.CancelScope) -> None:
    """Do what the parent asks until it asks for the end, or is gone."""
    waiting = b""
    while True:
        try:
            got = await control.receive_some()
        except trio.BrokenResourceError:
            got = b""
        if not got:
            scope.cancel()
            return
        waiting += got
        while len(waiting) >= _REQUEST_SIZE:
            what, seconds = waiting[:1], int.from_bytes(waiting[1:_REQUEST_SIZE], "big") / 1000
            waiting = waiting[_REQUEST_SIZE:]
            drained = await server.drain(seconds)
            await control.send_all(b"y" if drained else b"n")
            if what == b"q":
                scope.cancel()
                return


async def _end_with(parent: int, scope: trio.CancelScope) -> None:
    """A pidfd can be read once its process is gone."""
    await trio.lowlevel.wait_readable(parent)
    scope.cancel()


async def _serve(order: dict[str, Any]) -> None:
    listeners = [socket.socket(fileno=fd) for fd in order["listeners"]]
    ours = trio.socket.from_stdlib_socket(socket.socket(fileno=order["control"]))
    with DataStream.open(
        order["file"], follow=True, name=order["name"], index=order["index"]
    ) as stream:
        server = Server(stream, max_clients=order["max_clients"], waker=order["waker"])
        async with trio.SocketStream(ours) as control, trio.open_nursery() as nursery:
            await nursery.start(server.run, listeners)
            nursery.start_soon(_obey, control, server, nursery.cancel_scope)
            if order["parent"] >= 0:
                nursery.start_soon(_end_with, order["parent"], nursery.cancel_scope)
            await control.send_all(b"r")


def main() -> None:
    """Serve as the order in the first argument says, until the parent ends it."""
    # Ctrl-C in the parent's terminal is the parent's; it ends this process in good order.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    order = json.loads(sys.argv[1])
    logging.basicConfig(
        level=order["log_level"], format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    for fd in (order["file"], order["waker"], order["control"], *order["listeners"]):
        os.set_inheritable(fd, False)
    trio.run(_serve, order)


if __name__ == "__main__":
    main()
