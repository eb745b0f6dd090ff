"""The publishers of Trio."""

from __future__ import annotations

from datastreamer.client.effects import opener
from datastreamer.client.trio_driver import trio_driver_to
from datastreamer.publisher.async_publisher import Publisher

connect_publisher = opener(Publisher, trio_driver_to, "connect_publisher", "datastreamer")
