"""Splits payloads into messages, and reassembles them from any number of producers.

Names are loaded on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from datastreamer._lazy import load_on_use

if TYPE_CHECKING:
    from datastreamer.reassembly._messages import pack_message as pack_message
    from datastreamer.reassembly._messages import pack_records as pack_records
    from datastreamer.reassembly._messages import scan_records as scan_records
    from datastreamer.reassembly._messages import unpack_message as unpack_message
    from datastreamer.reassembly._reassembler import Reassembler as Reassembler
    from datastreamer.reassembly.cardinal import CardinalPayload as CardinalPayload
    from datastreamer.reassembly.cardinal import CardinalReassembler as CardinalReassembler
    from datastreamer.reassembly.cardinal import CardinalReorg as CardinalReorg
    from datastreamer.reassembly.checkpoint import Checkpoint as Checkpoint
    from datastreamer.reassembly.checkpoint import SourceCounts as SourceCounts
    from datastreamer.reassembly.checkpoint import Stats as Stats
    from datastreamer.reassembly.events import Conflict as Conflict
    from datastreamer.reassembly.events import Dropped as Dropped
    from datastreamer.reassembly.events import Event as Event
    from datastreamer.reassembly.events import Malformed as Malformed
    from datastreamer.reassembly.events import PayloadComplete as PayloadComplete
    from datastreamer.reassembly.orderer import Applied as Applied
    from datastreamer.reassembly.orderer import Block as Block
    from datastreamer.reassembly.orderer import Gap as Gap
    from datastreamer.reassembly.orderer import Orderer as Orderer
    from datastreamer.reassembly.orderer import Rejected as Rejected
    from datastreamer.reassembly.orderer import Reorg as Reorg
    from datastreamer.reassembly.portions import wanted as wanted
    from datastreamer.reassembly.producer import AsyncProducer as AsyncProducer
    from datastreamer.reassembly.producer import Producer as Producer
    from datastreamer.reassembly.progress import ReassemblyProgress as ReassemblyProgress
    from datastreamer.reassembly.progress import ReassemblyStore as ReassemblyStore
    from datastreamer.reassembly.splitter import Splitter as Splitter

_names, __getattr__, __dir__ = load_on_use(
    __name__,
    {
        "_messages": ("pack_message", "pack_records", "scan_records", "unpack_message"),
        "_reassembler": ("Reassembler",),
        "cardinal": ("CardinalPayload", "CardinalReassembler", "CardinalReorg"),
        "checkpoint": ("Checkpoint", "SourceCounts", "Stats"),
        "events": ("Conflict", "Dropped", "Event", "Malformed", "PayloadComplete"),
        "orderer": ("Applied", "Block", "Gap", "Orderer", "Rejected", "Reorg"),
        "portions": ("wanted",),
        "producer": ("AsyncProducer", "Producer"),
        "progress": ("ReassemblyProgress", "ReassemblyStore"),
        "splitter": ("Splitter",),
    },
)

__all__ = [*_names]
