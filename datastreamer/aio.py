"""The clients for asyncio: the same as the package's own for Trio.

Needs an event loop that watches descriptors (`add_reader`), as those of Unix do. Does not load
trio.
"""

from __future__ import annotations

from typing import cast

from datastreamer.client.async_client import Batches, Client, Entries
from datastreamer.client.asyncio_driver import AsyncioDriver
from datastreamer.client.effects import opener
from datastreamer.consumer.async_reassembly import Reassembly
from datastreamer.consumer.reassemble import Reassemble
from datastreamer.publisher.async_publisher import Publisher

__all__ = [
    "Batches",
    "Client",
    "Entries",
    "Publisher",
    "Reassembly",
    "connect",
    "connect_publisher",
    "reassemble",
]

connect = opener(Client, AsyncioDriver, "connect", __name__)
connect_publisher = opener(Publisher, AsyncioDriver, "connect_publisher", __name__)
reassemble = cast("Reassemble", opener(Reassembly, AsyncioDriver, "reassemble", __name__))
