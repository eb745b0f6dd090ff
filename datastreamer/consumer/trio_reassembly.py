"""The reassemblies of Trio."""

from __future__ import annotations

from datastreamer.client.trio_driver import trio_driver_to
from datastreamer.consumer.async_reassembly import ReassemblyOpener

reassemble = ReassemblyOpener(trio_driver_to)
