"""The reassemblies of Trio."""

from __future__ import annotations

from typing import cast

from datastreamer.client.effects import opener
from datastreamer.client.trio_driver import trio_driver_to
from datastreamer.consumer.async_reassembly import Reassembly
from datastreamer.consumer.reassemble import Reassemble

reassemble = cast("Reassemble", opener(Reassembly, trio_driver_to, "reassemble", "datastreamer"))
