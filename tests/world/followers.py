"""Followers over HTTP: clients that are sent events as entries are committed, as browsers are.

Owns what a follower does with its events. A follower of a
durable stream continues with the id of its last event; of another one, which a power cut may take
back without a trace, it begins again whenever its connection is lost.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field

import trio

from tests.http.test_follow import Events
from tests.world.actors import Surroundings
from tests.world.drivers import name_here
from tests.world.machines import Program
from tests.world.model import Seen, Wrong
from tests.world.network import ClientStream, Network

_PAUSE_SECONDS = 0.5
# A connection that no longer carries anything is given up after this time.
_SILENCE_SECONDS = 20.0


@dataclass
class FollowerProgram:
    """A follower of one server."""

    around: Surroundings
    network: Network
    name: str
    servers: tuple[str, ...]
    durable: bool
    """Whether no power cut takes back what the server has sent."""
    style: str = "follows"
    seen: Seen = field(init=False)

    def __post_init__(self) -> None:
        self.seen = Seen(self.name)
        self._id: str | None = None

    async def run(self, program: Program) -> None:
        while True:
            with contextlib.suppress(OSError, trio.BrokenResourceError):
                await self._follow()
            await trio.sleep(_PAUSE_SECONDS * (1 + self.around.chance.random()))

    async def _follow(self) -> None:
        if self._id is None or not self.durable:
            self.seen.rewind(0)
            self._id = None
        lines = ["GET /v1/follow?from=0 HTTP/1.1", "Host: localhost"]
        if self._id is not None:
            lines.append(f"Last-Event-ID: {self._id}")
        connection = await self.network.connect(name_here.get(), self.servers[0])
        async with ClientStream(connection) as stream:
            await stream.send_all("\r\n".join((*lines, "", "")).encode())
            client = Events(stream)
            client.id, epoch = self._id, 0
            while True:
                event = None
                with trio.move_on_after(_SILENCE_SECONDS):
                    event = await client.event()
                if client.head and not client.head.startswith(b"HTTP/1.1 200 "):
                    self.around.trace.note("refused", self.name, client.head[:20])
                    if client.head.startswith(b"HTTP/1.1 410 "):
                        self._id = None
                    return
                if event is None:
                    return
                before, epoch = epoch, int((client.id or "").partition("-")[2] or 0)
                if epoch < before:
                    raise Wrong(
                        f"{self.name} is sent {client.id} after something of epoch {before}"
                    )
                self._apply(event["event"], event["data"])
                self._id = client.id

    def _apply(self, kind: str, data: object) -> None:
        model, image = self.around.model, self.around.image()
        if kind == "truncated":
            assert isinstance(data, dict)
            self.around.trace.note("rollback", self.name, data["total_entries"], self.seen.next)
            model.rewind(self.seen, data["total_entries"])
            return
        assert isinstance(data, list)
        for row in data:
            item = row["type"], bytes.fromhex(row["data"][2:])
            if kind == "updated":
                model.check_entry(row["number"], item, image)
            else:
                model.deliver(self.seen, row["number"], item, image)
