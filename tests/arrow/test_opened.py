"""Columns of opened transactions: those of `open_transaction`, made only if they are named."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest

from datastreamer import DataStream, arrow
from datastreamer.arrow import opened
from datastreamer.errors import DecodeFailed, ExtraMissing, UsageError
from datastreamer.zkevm import Transaction, decode_batch, encode, fixed, open_transaction
from datastreamer.zkevm import transactions as transactions_module
from tests.arrow.test_record_batches import batch_of

for name in ("rlp", "sha3", "coincurve"):
    pytest.importorskip(name, reason=f"{name} is not installed")

NAMES = opened.OPENED.names
# The example of EIP-155.
EIP155 = bytes.fromhex(
    "f86c098504a817c800825208943535353535353535353535353535353535353535880de0b6b3a76400008025a028ef61"
    "340bd939bc2195fe537567866003e1a15d3c71ff63e1590620aa636276a067cbe9d8997f761aecb703304b3800ccf555"
    "c9f3dc64214b297fb1966a3b6d83"
)


def expected(encoded: bytes) -> dict[str, Any]:
    row = dict.fromkeys(NAMES)
    try:
        it = open_transaction(encoded)
    except DecodeFailed as error:
        return row | {"open_error": error.reason}
    price = it.gas_price if it.max_fee_per_gas is None else it.max_fee_per_gas
    same = ("nonce", "gas", "max_priority_fee_per_gas", "max_fee_per_gas", "to", "input")
    return (
        row
        | {name: getattr(it, name) for name in (*same, "contract", "hash", "sender")}
        | {"kind": it.type, "gas_price": price, "value": str(it.value)}
        | {"selector": it.input[:4] if it.to and len(it.input) >= 4 else None}
        | {"creates_contract": it.to is None}
    )


def test_the_real_stream(real_stream: Path) -> None:
    with DataStream.open(real_stream, read_only=True) as stream:
        sent = [
            (number, event)
            for run in stream.batches()
            for number, event in decode_batch(run, version=2)
            if isinstance(event, Transaction)
        ]
    table = arrow.ArrowStream(real_stream, "transactions", columns=["entry_number", *NAMES])
    assert table.schema == arrow.schema("transactions", ["entry_number", *NAMES])
    found = table.reader().read_all()
    found.validate(full=True)
    rows = [{"entry_number": number} | expected(event.encoded) for number, event in sent]
    assert found.to_pylist() == rows
    assert sum(row["sender"] is not None for row in rows) > 400


def test_what_cannot_be_opened_and_what_is_no_transaction() -> None:
    large = EIP155[:2] + b"\x88" + b"\xff" * 8 + EIP155[3:]
    large = bytes([large[0], large[1] + 8]) + large[2:]
    run = batch_of(
        [encode(Transaction(7, encoded=each), version=3) for each in (EIP155, b"\xc0", b"", large)]
        + [(3, b"\xff")]
    )
    columns = ["error", "l2block_number", "nonce", "to", "encoded", "hash", "open_error"]
    found = arrow.to_record_batch(
        run, "transactions", version=3, columns=columns, on_error="null"
    ).to_pylist()
    assert found[0]["hash"] == open_transaction(EIP155).hash
    assert (found[0]["nonce"], found[0]["to"], found[0]["encoded"]) == (9, b"5" * 20, EIP155)
    for row in found[1:3]:
        assert (row["l2block_number"], row["hash"], row["error"]) == (7, None, None)
        assert row["open_error"].startswith("not a transaction")
    assert (found[3]["nonce"], found[3]["open_error"]) == (None, None)
    assert found[3]["hash"] == open_transaction(large).hash
    assert found[4]["error"].startswith("entry 9: invalid Transaction")
    assert [name for name, value in found[4].items() if value is not None] == ["error"]
    one = arrow.to_record_batch(run, "transactions", version=3, columns=["hash"], on_error="drop")
    assert one.column("hash").to_pylist() == [row["hash"] for row in found[:4]]


def test_version_1() -> None:
    run = batch_of([encode(fixed.L2Tx(255, True, None, EIP155), version=1)])
    found = arrow.to_record_batch(run, "transactions", version=1, columns=["sender", "value"])
    assert found.to_pylist() == [{"sender": open_transaction(EIP155).sender, "value": str(10**18)}]


def test_only_what_is_named_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bool] = []

    def spy(encoded: bytes, *, sender: bool) -> Any:
        asked.append(sender)
        return open_transaction(encoded, sender=sender)

    monkeypatch.setattr(opened, "open_transaction", spy)
    run = batch_of([encode(Transaction(7, encoded=EIP155), version=3)])
    whole = arrow.to_record_batch(run, "transactions", version=3)
    assert whole.schema.names == arrow.schema("transactions").names
    assert set(NAMES).isdisjoint(whole.schema.names)
    assert asked == []
    for names, expected_senders in ((["hash", "value"], [False]), (["contract"], [True])):
        arrow.to_record_batch(run, "transactions", version=3, columns=names)
        assert asked == expected_senders
        asked.clear()
    with pytest.raises(UsageError, match="has no column 'sender'"):
        arrow.schema("blocks", ["sender"])


def test_without_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    def without(name: str) -> Any:
        if name == "coincurve":
            raise ImportError(name)
        return importlib.import_module(name)

    monkeypatch.setattr(transactions_module, "import_module", without)
    transactions_module._tools.cache_clear()
    run = batch_of([encode(Transaction(7, encoded=EIP155), version=3)])
    try:
        assert arrow.to_record_batch(run, "transactions", version=3).num_rows == 1
        with pytest.raises(ExtraMissing, match=r"pip install 'datastreamer\[zkevm\]'"):
            arrow.to_record_batch(run, "transactions", version=3, columns=["hash"])
    finally:
        transactions_module._tools.cache_clear()
