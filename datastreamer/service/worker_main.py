"""The serving process of a `StreamServer`: ``python -m datastreamer.service.worker_main ORDER``.

Follows the file through an inherited descriptor, serves on inherited listeners, and ends with its
parent. `control_protocol.py` has the protocol between the two.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import sys
from typing import Any

import trio

from datastreamer.errors import BadCertificate
from datastreamer.format import U64_MAX
from datastreamer.http.options import HttpOptions
from datastreamer.http.ports import Ports
from datastreamer.http.serving import start_ports
from datastreamer.metrics.exposition import load_exporter
from datastreamer.metrics.writer_numbers import WriterNumbers
from datastreamer.server.admission.accept_balance import AcceptBalance
from datastreamer.server.limits import Limits
from datastreamer.server.metrics import collect
from datastreamer.server.server import Server
from datastreamer.service import control_protocol as control
from datastreamer.service.log import log_to_stderr
from datastreamer.service.parent_metrics import ParentMetrics
from datastreamer.storage.parts import ChangeBegins, ChangeEnds
from datastreamer.storage.stream import DataStream
from datastreamer.transport.tls import ServerTLS
from datastreamer.transport.tls_stream import reload_and_log, reload_on_hangup

# In the order: lists of descriptors, and single ones.
_LISTENERS = ("clients", "metrics", "web")
_DESCRIPTORS = ("file", "control", "waker", "early_waker", "turns", "numbers", "asking")


async def _serve_parent(
    link: trio.abc.Stream, server: Server, tls: ServerTLS | None, scope: trio.CancelScope
) -> None:
    """Report that clients are served, and execute the parent's requests until it asks for the end
    or has died; then cancel `scope`. Only this task sends: the parent may send a request before a
    send has returned."""
    # The parent may die at any moment.
    with contextlib.suppress(trio.BrokenResourceError):
        await _answer_all(link, server, tls)
    scope.cancel()


async def _answer_all(link: trio.abc.Stream, server: Server, tls: ServerTLS | None) -> None:
    """Execute requests up to the request for the end. Raises `trio.BrokenResourceError` if the
    parent has died."""
    await link.send_all(control.READY)
    waiting = b""
    while got := await link.receive_some():
        waiting += got
        while waiting and len(waiting) >= (size := 5 + control.SIZES[waiting[:1]]):
            what, number, words = waiting[:1], waiting[1:5], waiting[5:size]
            waiting = waiting[size:]
            answer = b""
            if what in (control.DRAIN, control.QUIT):
                (milliseconds,) = control.NUMBER.unpack(words)
                wait = server.drain if what == control.DRAIN else server.finish
                done = await wait(milliseconds / 1000)
            elif what == control.RELOAD:
                done = tls is not None and reload_and_log(tls)
            elif what == control.METRICS:
                (limit,) = control.NUMBER.unpack(words)
                answer, done = json.dumps(await collect(server, limit=limit)).encode(), True
            else:
                start, last, offset = control.RANGE.unpack(words)
                stop = None if last == U64_MAX else last
                begins = what == control.CHANGE
                server.change(
                    ChangeBegins(start, stop, offset) if begins else ChangeEnds(start, stop)
                )
                done = True
            verdict = control.YES if done else control.NO
            (asked,) = control.NUMBER.unpack(number)
            await link.send_all(control.ANSWER.pack(verdict, asked, len(answer)) + answer)
            if what == control.QUIT:
                return


async def _end_with(parent: int, scope: trio.CancelScope) -> None:
    """Cancel `scope` when the parent has ended: then its pidfd is readable."""
    await trio.lowlevel.wait_readable(parent)
    scope.cancel()


async def _serve(order: dict[str, Any]) -> None:
    sockets = ([socket.socket(fileno=fd) for fd in order[name]] for name in _LISTENERS)
    ports = Ports(None if order["http"] is None else HttpOptions(**order["http"]), *sockets)
    numbers = None if order["numbers"] is None else WriterNumbers(order["numbers"], write=False)
    if order["gathered"]:
        with contextlib.suppress(ImportError):
            load_exporter()
    ours = trio.socket.from_stdlib_socket(socket.socket(fileno=order["control"]))
    tls = None if order["tls"] is None else ServerTLS.from_json(order["tls"])
    with contextlib.ExitStack() as stack:
        stream = stack.enter_context(
            DataStream.open(
                order["file"],
                follow=True,
                name=order["name"],
                index=order["index"],
                verify="never",  # the server compares what it reads from the disk
            )
        )
        # The stream has its own copy, and closes that if its file is replaced.
        os.close(order["file"])
        balance = None
        if order["turns"] is not None:
            balance = AcceptBalance(order["turns"], order["at"])
            stack.callback(balance.close)
        limits = Limits(**order["limits"])
        server = Server(
            stream,
            limits=limits,
            waker=order["waker"],
            early_waker=order["early_waker"],
            tls=tls,
            balance=balance,
            changes_streams=order["changes_streams"],
            logs_file=order["at"] == 0,
            other_connections=ports.http_clients,
        )
        async with trio.SocketStream(ours) as control_link, trio.open_nursery() as nursery:
            await nursery.start(server.run, ports.clients)
            gather = None
            if order["asking"] is not None:
                link = trio.socket.from_stdlib_socket(socket.socket(fileno=order["asking"]))
                gather = ParentMetrics(trio.SocketStream(link)).gather
            await start_ports(nursery, server, ports, numbers, gather)
            if tls is not None:
                await nursery.start(reload_on_hangup, tls)
            if order["parent"] >= 0:
                nursery.start_soon(_end_with, order["parent"], nursery.cancel_scope)
            nursery.start_soon(_serve_parent, control_link, server, tls, nursery.cancel_scope)


def main() -> None:
    """Serve as the JSON in the first argument says, until the parent ends it."""
    # The parent handles Ctrl-C in its terminal and signals that a service manager sends to all
    # processes: it shuts this process down in order, and if it dies, this process ends.
    for number in control.OF_PARENT:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, control.OF_PARENT)
    order = json.loads(sys.argv[1])
    log_to_stderr(order["log_style"], order["log_level"])
    given = [order[name] for name in _DESCRIPTORS if order[name] is not None]
    for fd in (*given, *(fd for name in _LISTENERS for fd in order[name])):
        os.set_inheritable(fd, False)
    try:
        trio.run(_serve, order)
    except BadCertificate as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
