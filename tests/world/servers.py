"""The programs that serve: the origin, which publishers write to, and relays of it.

Owns how they are started on a simulated disk, how their connections come from the simulated
network, and what an operator does to the origin. Knows the model only to report changes to it.
"""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Callable
from dataclasses import dataclass, replace

import trio

from datastreamer.errors import (
    CommitInDoubt,
    DatastreamerError,
    FileMissing,
    LeaseHeld,
    OperationOpen,
)
from datastreamer.protocol.retry import Backoff
from datastreamer.relay.relay import Relay
from datastreamer.server.limits import Limits
from datastreamer.server.publish.policy import Publishing
from datastreamer.server.server import Server
from datastreamer.storage.stream import DataStream
from datastreamer.storage.write.sync_policy import SyncPolicy
from datastreamer.transport.refusal_log import RefusalLog
from datastreamer.transport.server_stream import SocketTransport, Transport
from datastreamer.transport.tls import ServerTLS
from datastreamer.transport.tls_stream import TLSTransport
from tests.storage.lab.image import Image
from tests.storage.lab.model import abandon
from tests.world.follower_answers import NAME, serve_follower
from tests.world.machines import Accept, Machine, Program
from tests.world.model import Model

PATH = "/stream.bin"
ORIGIN = "origin"
LEASE_SECONDS = 6.0
BACKOFF = Backoff(0.1, 2.0)

# Beside the package, so that the trace has it.
_log = logging.getLogger("datastreamer.world")
LIMITS = Limits(write_timeout=20.0, handshake_timeout=30.0, command_timeout=20.0)
SCRUBBING = replace(LIMITS, scrub_rate=20e6)
_RETRY_SECONDS = 1.0
_FILE_BYTES = 128 << 10


async def opened(program: Program, sync: SyncPolicy) -> DataStream:
    """The stream on a program's disk, as soon as the disk allows that."""
    while True:
        try:
            try:
                return DataStream.open(
                    PATH, sync=sync, index="memory", verify="always", disk=program.disk
                )
            except FileMissing:
                return DataStream.create(PATH, sync=sync, index="memory", disk=program.disk)
        except DatastreamerError as error:
            _log.warning("the stream cannot be opened: %s", error)
            await trio.sleep(_RETRY_SECONDS)


def closed(program: Program, stream: DataStream) -> None:
    """Close a stream, or let go of it if its program has ended."""
    if not program.alive:
        abandon(stream)
    try:
        stream.close()
    except DatastreamerError as error:
        _log.warning("the stream cannot be closed: %s", error)


@dataclass
class Origin:
    """The origin's program."""

    model: Model
    sync: SyncPolicy
    token_file: str
    image: Callable[[], Image]
    """The file, as the model reads it."""
    limits: Limits
    stream: DataStream | None = None
    server: Server | None = None

    async def run(self, program: Program) -> None:
        stream = await opened(program, self.sync)
        self.model.opened(self.image())
        try:
            terms = Publishing(token_file=self.token_file, lease=LEASE_SECONDS)
            self.server = Server(stream, limits=self.limits, publishing=terms)
            self.stream = stream
            async with trio.open_nursery() as nursery:
                await nursery.start(self.server.run, [])
                program.listen(serve_by(program, lambda: self.server))
        finally:
            self.stream = self.server = None
            closed(program, stream)

    # What an operator does.

    def truncate(self, share: float) -> bool:
        """Remove the last entries, up to an operation's end; False if that is not possible now."""
        stream = self.stream
        if stream is None:
            return False
        self.model.look(self.image())
        total = stream.total_entries
        ends = [end for end in self.model.present_ends() if end <= total]
        keep = ends[int(share * (len(ends) - 1))]
        return self._change(lambda: self._truncate(stream, keep))

    def _truncate(self, stream: DataStream, keep: int) -> None:
        stream.parts.writer.lend(self)
        stream.parts.writer.end_lease(self)
        end = stream._ensure_writable().end
        refused = end.state == "interrupted"
        if not refused:
            self.model.truncate(keep)
        try:
            stream.truncate(keep)
        except CommitInDoubt:
            if end.state == "interrupted" and not refused:
                # The entries are served until the next open, which may complete it.
                self.model.in_doubt = keep
            raise
        self.model.look_anew(self.image())

    def update(self, at: int) -> bool:
        """Update an event in place; False if that is not possible now."""
        stream = self.stream
        if stream is None:
            return False
        self.model.look(self.image())
        total = min(stream.total_entries, len(self.model.history))
        present = enumerate(self.model.history[:total])
        events = [n for n, (op, at) in present if self.model.operations[op].sizes[at]]
        if not events:
            return False
        number = events[at % len(events)]
        return self._change(lambda: self._update(stream, number))

    def _update(self, stream: DataStream, number: int) -> None:
        (kind, data), version = self.model.update(number)
        stream.update_entry(number, kind, data)
        self.model.updated(number, version)

    def _change(self, change: Callable[[], None]) -> bool:
        try:
            change()
        except (LeaseHeld, OperationOpen):
            return False
        except DatastreamerError as error:
            _log.warning("a change failed: %s", error)
        return True


@dataclass
class RelayProgram:
    """A relay of one or more servers."""

    upstreams: tuple[str, ...]
    sync: SyncPolicy
    limits: Limits
    relay: Relay | None = None

    async def run(self, program: Program) -> None:
        relay = Relay(
            [(name, 6900) for name in self.upstreams],
            PATH,
            index="memory",
            sync=self.sync,
            limits=self.limits,
            on_rewrite="follow",
            patience=10.0,
            timeout=4.0,
            heartbeat=4.0,
            backoff=BACKOFF,
            look_seconds=5.0,
        )
        relay._disk = program.disk
        self.relay = relay

        class Started:
            def started(self, _: object) -> None:
                program.listen(serve_by(program, lambda: relay.server))

        try:
            await relay.run([], task_status=Started())
        except DatastreamerError as error:
            _log.warning("the relay has ended: %s", error)
        finally:
            self.relay = None
            if relay.stream is not None and not program.alive:
                abandon(relay.stream)


class SimTransport(SocketTransport):
    """A server's end of a connection. The file that it sends from is on a simulated disk."""

    def __init__(self, connection: socket.socket, peer: str, program: Program) -> None:
        super().__init__(connection, peer)
        self._program = program

    def send_file(self, file: int, offset: int, count: int) -> int:
        count = min(count, _FILE_BYTES)
        if file < 0:
            data = image_of(self._program.machine).read(count, offset)
        else:  # pages that were fetched from an archive
            data = os.pread(file, count, offset)
        if count and not data:
            raise EOFError(f"the file ends at byte {offset}")
        return self.send_now(data)


def serve_by(
    program: Program, server: Callable[[], Server | None], tls: ServerTLS | None = None
) -> Accept:
    """Serves the connections that a program accepts."""

    async def serve(connection: socket.socket, peer: str) -> None:
        serving = server()
        transport: Transport = SimTransport(connection, peer, program)
        if tls is not None:
            transport = TLSTransport(connection, peer, tls, RefusalLog(_log))
        if serving is None:
            await transport.close()
        elif peer.startswith(NAME):
            await serve_follower(serving, transport)
        else:
            await serving.handle(transport)

    return serve


def image_of(machine: Machine) -> Image:
    """The stream file of a machine, as its programs see it; empty if there is none."""
    try:
        return machine.disk.find(PATH).seen
    except FileNotFoundError:
        return Image()
