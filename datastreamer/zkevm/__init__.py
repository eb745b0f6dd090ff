"""The events of a zkEVM sequencer's stream: decoding, checking and writing them.

Names are loaded on first use. `datastream_pb2` is the module of the classes that protoc generates.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from datastreamer._lazy import load_on_use

if TYPE_CHECKING:
    from datastreamer.zkevm.check.sequence import SequenceCheck as SequenceCheck
    from datastreamer.zkevm.decoding import Event as Event
    from datastreamer.zkevm.decoding import as_json as as_json
    from datastreamer.zkevm.decoding import decode as decode
    from datastreamer.zkevm.decoding import decode_batch as decode_batch
    from datastreamer.zkevm.decoding import decode_data as decode_data
    from datastreamer.zkevm.decoding import encode as encode
    from datastreamer.zkevm.events import BatchEnd as BatchEnd
    from datastreamer.zkevm.events import BatchStart as BatchStart
    from datastreamer.zkevm.events import BatchType as BatchType
    from datastreamer.zkevm.events import BookMark as BookMark
    from datastreamer.zkevm.events import BookmarkType as BookmarkType
    from datastreamer.zkevm.events import L2Block as L2Block
    from datastreamer.zkevm.events import L2BlockEnd as L2BlockEnd
    from datastreamer.zkevm.events import Transaction as Transaction
    from datastreamer.zkevm.events import UpdateGER as UpdateGER
    from datastreamer.zkevm.fixed import EndL2Block as EndL2Block
    from datastreamer.zkevm.fixed import FixedUpdateGER as FixedUpdateGER
    from datastreamer.zkevm.fixed import L2Tx as L2Tx
    from datastreamer.zkevm.fixed import StartL2Block as StartL2Block
    from datastreamer.zkevm.proto import datastream_pb2 as datastream_pb2
    from datastreamer.zkevm.sequencer import Sequencer as Sequencer
    from datastreamer.zkevm.transactions import OpenedTransaction as OpenedTransaction
    from datastreamer.zkevm.transactions import open_transaction as open_transaction

_names, __getattr__, __dir__ = load_on_use(
    __name__,
    {
        "decoding": ("Event", "as_json", "decode", "decode_batch", "decode_data", "encode"),
        "events": (
            *("BatchEnd", "BatchStart", "BatchType", "BookMark", "BookmarkType", "L2Block"),
            *("L2BlockEnd", "Transaction", "UpdateGER"),
        ),
        "fixed": ("EndL2Block", "FixedUpdateGER", "L2Tx", "StartL2Block"),
        "check.sequence": ("SequenceCheck",),
        "proto.datastream_pb2": ("datastream_pb2",),
        "sequencer": ("Sequencer",),
        "transactions": ("OpenedTransaction", "open_transaction"),
    },
)

__all__ = [*_names]
