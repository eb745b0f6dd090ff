"""The fields of opened transactions, as columns beside those of the table `transactions`.

Owns their names and types. They take tens of microseconds per transaction, so they are made only if
they are named. The packages of the extra ``zkevm`` are needed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import pyarrow as pa

from datastreamer.errors import DecodeFailed
from datastreamer.zkevm.transactions import open_transaction

OPENED: Final = pa.schema(
    {
        "kind": pa.int32(),
        "nonce": pa.int64(),
        "gas": pa.int64(),
        "gas_price": pa.int64(),
        "max_priority_fee_per_gas": pa.int64(),
        "max_fee_per_gas": pa.int64(),
        "value": pa.string(),
        "to": pa.binary(),
        "input": pa.binary(),
        "selector": pa.binary(),
        "creates_contract": pa.bool_(),
        "contract": pa.binary(),
        "hash": pa.binary(),
        "sender": pa.binary(),
        "open_error": pa.string(),
    }
)
"""The columns. Numbers above those of int64 are null. `open_error` says why a transaction cannot be
opened, whose other columns are null."""

_MOST: Final = (1 << 63) - 1
_SELECTOR_SIZE: Final = 4


def opened_columns(encoded: Any, names: Sequence[str]) -> dict[str, Any]:
    """These columns of the transactions with these encodings; null where an encoding is."""
    # Most of the time goes into the sender, on which the created contract depends.
    sender = "sender" in names or "contract" in names
    rows = [{} if each is None else _opened(each, sender) for each in encoded.to_pylist()]
    return {
        name: pa.array([row.get(name) for row in rows], OPENED.field(name).type) for name in names
    }


def _opened(encoded: bytes, sender: bool) -> dict[str, Any]:
    try:
        opened = open_transaction(encoded, sender=sender)
    except DecodeFailed as error:
        return {"open_error": error.reason}
    price = opened.max_fee_per_gas if opened.gas_price is None else opened.gas_price
    calls = opened.to is not None and len(opened.input) >= _SELECTOR_SIZE
    return {
        "kind": opened.type,
        "nonce": _signed(opened.nonce),
        "gas": _signed(opened.gas),
        "gas_price": _signed(price),
        "max_priority_fee_per_gas": _signed(opened.max_priority_fee_per_gas),
        "max_fee_per_gas": _signed(opened.max_fee_per_gas),
        "value": str(opened.value),
        "to": opened.to,
        "input": opened.input,
        "selector": opened.input[:_SELECTOR_SIZE] if calls else None,
        "creates_contract": opened.to is None,
        "contract": opened.contract,
        "hash": opened.hash,
        "sender": opened.sender,
    }


def _signed(number: int | None) -> int | None:
    """The number, or null if it exceeds a signed 64-bit column."""
    return number if number is not None and number <= _MOST else None
