"""What the output of a client has sent when it says so."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

from datastreamer.server.streaming.output import ClientOutput


class HoldsBack:
    """A transport that takes all, and keeps it until there is room, as TLS does with ciphertext."""

    holds_back = False

    def __init__(self) -> None:
        self.kept = self.sent = b""

    def send_now(self, data: bytes) -> int:
        self.kept += bytes(data)
        self.holds_back = True
        return len(data)

    async def send(self, data: bytes) -> None:
        self.sent += self.kept + bytes(data)
        self.kept, self.holds_back = b"", False


async def test_what_a_transport_holds_back_is_sent() -> None:
    transport, counts = HoldsBack(), SimpleNamespace(bytes_sent=0)
    output = ClientOutput(cast("Any", transport), cast("Any", counts))
    await output.send(b"an answer")
    assert (transport.sent, transport.kept) == (b"an answer", b"")
    assert (output.sent, counts.bytes_sent) == (9, 9)
