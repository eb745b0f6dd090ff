"""What the columns of tables are, in the words that SQL's DESCRIBE shows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from pyspark.sql.types import StructField, StructType

from datastreamer.arrow.tables import ENTRIES

_OF_COLUMNS: Final[Mapping[str, str]] = {
    "base_fee": "base fee of the block, as the node writes it",
    "batch_number": "the batch of the block or update",
    "block_gas_limit": "gas limit; 2^64 - 1 of nodes that set none",
    "block_info_root": "root of the block's information tree",
    "chain_id": "chain id",
    "coinbase": "address that gets the fees, 20 bytes",
    "data": "the entry's payload",
    "debug": "debugging text of the sequencer",
    "delta_timestamp": "seconds since the block before",
    "effective_gas_price_percentage": "effective gas price, 255 for 100 %",
    "encoded": "the signed transaction, RLP",
    "entry_number": "number of the row's entry in the stream",
    "error": "why the row's fields are null",
    "fork_id": "fork id",
    "global_exit_root": "global exit root, 32 bytes",
    "hash": "hash of the block, 32 bytes",
    "im_state_root": "state root after the transaction, 32 bytes",
    "index": "position of the transaction in its block",
    "is_valid": "whether the transaction is executed",
    "key": "the whole bookmark",
    "l1_blockhash": "hash of the L1 block, 32 bytes",
    "l1_info_root": "root of the L1 information tree, 32 bytes",
    "l1_infotree_index": "index in the L1 information tree",
    "l2block_number": "number of the transaction's block",
    "local_exit_root": "local exit root, 32 bytes",
    "min_timestamp": "least timestamp, Unix seconds",
    "number": "number of the block or batch",
    "state_root": "state root, 32 bytes",
    "system_id": "system id of the stream",
    "timestamp": "Unix seconds",
    "type": "kind of the batch or bookmark",
    "value": "number of the block or batch that the bookmark names",
}
_OF_ENTRIES: Final = {"number": "number of the entry in the stream", "type": "type of the entry"}


def with_comments(table: str, columns: StructType) -> StructType:
    """The columns of a table, each with a comment."""
    comments = {**_OF_COLUMNS, **(_OF_ENTRIES if table == ENTRIES else {})}
    return StructType(
        [
            StructField(it.name, it.dataType, it.nullable, {"comment": comments[it.name]})
            for it in columns
        ]
    )
