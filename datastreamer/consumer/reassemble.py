"""What `reassemble` is to a type checker: what it delivers depends on `order`."""

from __future__ import annotations

from typing import Protocol, Unpack, overload

from datastreamer.consumer.async_reassembly import Reassembly
from datastreamer.consumer.options import Addresses, OtherOptions
from datastreamer.reassembly.events import PayloadComplete
from datastreamer.reassembly.merge import Item, Order, OrderedItem


class Reassemble(Protocol):
    @overload
    def __call__(
        self, upstreams: Addresses, *, order: None = None, **options: Unpack[OtherOptions]
    ) -> Reassembly[PayloadComplete]: ...

    @overload
    def __call__(
        self, upstreams: Addresses, *, order: Order, **options: Unpack[OtherOptions]
    ) -> Reassembly[OrderedItem]: ...

    @overload
    def __call__(
        self, upstreams: Addresses, *, order: Order | None, **options: Unpack[OtherOptions]
    ) -> Reassembly[Item]: ...
