"""The publishers of Trio."""

from __future__ import annotations

from datastreamer.client.trio_driver import trio_driver_to
from datastreamer.publisher.async_publisher import PublisherConnector

connect_publisher = PublisherConnector(trio_driver_to)
