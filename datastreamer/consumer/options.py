"""The options of `reassemble`, and their checks."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Literal, TypeAlias, TypedDict

from datastreamer.client.upstream import Upstream, upstream_of
from datastreamer.consumer.state import Notice
from datastreamer.errors import UsageError
from datastreamer.format import STREAM_TYPE_SEQUENCER, U64_MAX
from datastreamer.protocol.arguments import check_number
from datastreamer.protocol.retry import Backoff, check_waits
from datastreamer.reassembly.merge import Order
from datastreamer.reassembly.portions import NESTED, wanted
from datastreamer.reassembly.progress import ReassemblyStore
from datastreamer.selection.clauses import Selection, selected
from datastreamer.selection.times import moment_ms
from datastreamer.transport.address import SERVERS, has_syntax

SourceAddress: TypeAlias = Upstream | tuple[str, int] | str | os.PathLike[str]
Addresses: TypeAlias = Iterable[SourceAddress] | Mapping[str, SourceAddress]

Start: TypeAlias = int | bytes | datetime | Literal["latest"]
"""Where a source without a saved position begins: an entry, a bookmark, a time, or its end."""


class OtherOptions(TypedDict, total=False):
    """The arguments of `reassemble` that do not change what it delivers."""

    subscribe: Iterable[bytes] | None
    store: ReassemblyStore | None
    after: bytes | None
    on_event: Callable[[Notice], object] | None
    follow: bool
    start: Start
    type: int
    reorg_threshold: int
    budget: int
    max_age: float | None
    stream_type: int | None
    batch_reads: bool
    timeout: float
    heartbeat: float | None
    backoff: Backoff
    retry_for: float | None


@dataclass(frozen=True, slots=True)
class ReassemblyOptions:
    """The arguments of `reassemble`. Raises `UsageError` for an invalid one."""

    upstreams: Addresses
    order: Order | None
    given: OtherOptions
    """All of them. `subscribe` is made a tuple here, with the prefix of nested headers."""

    @property
    def asked_type(self) -> int:
        """The stream type that requests name."""
        return (
            STREAM_TYPE_SEQUENCER
            if self.given["stream_type"] is None
            else self.given["stream_type"]
        )

    @property
    def where(self) -> Selection | None:
        """What servers are asked for; None: all entries."""
        if self.given["subscribe"] is None:
            return None
        return selected(where=wanted(self.given["subscribe"], self.given["type"]))

    def __post_init__(self) -> None:
        if self.given["subscribe"] is not None:
            self.given["subscribe"] = (*self.given["subscribe"], NESTED)
        if self.given["stream_type"] is not None:
            check_number("stream_type", self.given["stream_type"])
        check_waits(self.given["timeout"], self.given["retry_for"], self.given["heartbeat"])
        start = self.given["start"]
        if isinstance(start, datetime):
            moment_ms(start)
            return
        number = isinstance(start, int) and 0 <= start <= U64_MAX
        if not number and not (isinstance(start, bytes) and start) and start != "latest":
            raise UsageError(
                "sources begin at an entry's number, a bookmark's key, a datetime or \"latest\", "
                f"not at {start!r}"
            )


def named(addresses: Addresses) -> dict[str, Upstream | str]:
    """Sources by name; a file is its path. Raises `UsageError`."""
    pairs: list[tuple[str | None, SourceAddress]]
    if isinstance(addresses, str | bytes):
        raise UsageError(f'upstreams is a list such as ["tcp://host:6900"], not {addresses!r}')
    if isinstance(addresses, Mapping):
        pairs = list(addresses.items())
    else:
        pairs = [(None, address) for address in addresses]
    found: dict[str, Upstream | str] = {}
    for name, address in pairs:
        place: Upstream | str
        if isinstance(address, os.PathLike):
            place = os.fspath(address)
        elif isinstance(address, str) and not address.startswith(SERVERS):
            if has_syntax(address) and ":" in address and not os.path.exists(address):
                raise UsageError(f"{address}: no such file; write a server as tcp://{address}")
            place = address
        else:
            place = upstream_of(address)
        own = name or (place if isinstance(place, str) else place.name)
        if own in found:
            raise UsageError(f"{own} is named twice; name each source once")
        found[own] = place
    if not found:
        raise UsageError("no source is named; payloads need one source at least")
    return found
