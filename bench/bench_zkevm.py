"""zkEVM events: messages to Arrow columns, entries to events, transactions opened.

Rivals are what else could do the work: ptars (Rust) and protobuf's own classes for messages,
eth-account and eth-keys for transactions. All of them start from the same bytes in memory.
"""

from __future__ import annotations

import random
import shutil
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from datastreamer import DataStream
from datastreamer.zkevm import (
    L2Block,
    Transaction,
    decode_batch,
    encode,
    fixed,
    open_transaction,
)
from datastreamer.zkevm.schema import MESSAGES

_OPERATION = 1_000
_ROOT = bytes(range(32))
# As long as those of a production node's stream: 5 kB on average, most of it input.
_INPUT = 4_900


class Made(NamedTuple):
    """A stream of events of one type."""

    path: Path
    table: str
    type: int
    count: int


def _write(path: Path, version: int, events: Iterator[Any]) -> int:
    count = 0
    with DataStream.create(path, version=version, sync="os") as stream:
        made = list(events)
        for first in range(0, len(made), _OPERATION):
            packed = [encode(each, version=version) for each in made[first : first + _OPERATION]]
            with stream.atomic_op() as op:
                op.add_entries(packed[0][0], [data for _, data in packed])
            count += len(packed)
    return count


def _blocks(count: int) -> Iterator[L2Block]:
    for number in range(count):
        yield L2Block(
            *(number, number // 100, 1_700_000_000 + number, 3, 0, _ROOT, 7),
            *(_ROOT, _ROOT, _ROOT, _ROOT[:20], 30_000_000, _ROOT),
        )


def _layouts(count: int) -> Iterator[fixed.StartL2Block]:
    for number in range(count):
        yield fixed.StartL2Block(
            *(number // 100, number, 1_700_000_000 + number, 3, 7),
            *(_ROOT, _ROOT, _ROOT[:20], 9, 1101),
        )


def _signed(count: int) -> list[bytes]:
    """Transactions of the three types, signed."""
    accounts = import_module("eth_account").Account
    key, chance = bytes([1]) * 32, random.Random(1)
    made = []
    for number in range(count):
        fees: dict[str, Any] = [
            {"gasPrice": 10**9},
            {"type": 1, "gasPrice": 10**9, "accessList": []},
            {"type": 2, "maxFeePerGas": 10**9, "maxPriorityFeePerGas": 1, "accessList": []},
        ][number % 3]
        common = {"nonce": number, "gas": 21_000, "to": "0x" + "11" * 20, "value": 7}
        data = chance.randbytes(_INPUT)
        signed = accounts.sign_transaction({**common, **fees, "data": data, "chainId": 1101}, key)
        made.append(bytes(signed.raw_transaction))
    return made


@pytest.fixture(scope="module")
def signed(request: Any) -> list[bytes]:
    pytest.importorskip("eth_account", reason="eth-account is not installed: pip install '.[dev]'")
    return _signed(3 if request.config.getoption("benchmark_disable") else 300)


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path
    shutil.rmtree(tmp_path)


def _rows(made: Made, columns: list[str] | None = None) -> int:
    arrow = import_module("datastreamer.arrow")
    return sum(
        batch.num_rows
        for batch in arrow.ArrowStream(made.path, made.table, columns=columns).reader()
    )


def _to_arrow(versus: Any, made: Made, work: str) -> None:
    pytest.importorskip("pyarrow", reason="pyarrow is not installed: pip install '.[dev]'")
    import pyarrow as pa

    from datastreamer import arrow
    from datastreamer.zkevm.proto import datastream_pb2

    message = getattr(datastream_pb2, MESSAGES[made.type].name)
    names = [field.name for field in MESSAGES[made.type].fields if field.name != "debug"]

    def by_ptars() -> int:
        return sum(
            handler.array_to_record_batch(batch.column(0)).num_rows
            for batch in arrow.ArrowStream(made.path, columns=["data"]).reader()
        )

    def by_protobuf() -> int:
        rows = 0
        for batch in arrow.ArrowStream(made.path, columns=["data"]).reader():
            found = [message.FromString(data) for data in batch.column(0).to_pylist()]
            columns = {name: [getattr(each, name) for each in found] for name in names}
            rows += pa.table(columns).num_rows
        return rows

    rivals: dict[str, Any] = {"ptars (Rust)": None, "protobuf (upb), then pyarrow": by_protobuf}
    try:
        ptars = import_module("ptars")
    except ImportError:
        pass
    else:
        pool = ptars.HandlerPool([datastream_pb2.DESCRIPTOR])
        handler = pool.get_for_message(message.DESCRIPTOR)
        rivals["ptars (Rust)"] = by_ptars
        assert by_ptars() == made.count
    assert _rows(made) == by_protobuf() == made.count
    versus(
        work,
        lambda: _rows(made),
        rivals,
        unit="rows/s",
        amount=made.count,
        at_least={"ptars (Rust)": 1.0, "protobuf (upb), then pyarrow": 2.0},
    )


def test_blocks_to_arrow(versus: Any, smoke: bool, folder: Path) -> None:
    path = folder / "blocks.bin"
    count = _write(path, 3, _blocks(1_000 if smoke else 200_000))
    _to_arrow(versus, Made(path, "blocks", 2, count), "blocks to record batches, 190 B")


def test_transactions_to_arrow(versus: Any, smoke: bool, folder: Path, signed: list[bytes]) -> None:
    path = folder / "transactions.bin"
    count = _write(
        path,
        3,
        (
            Transaction(number, 0, True, signed[number % len(signed)], 255, _ROOT)
            for number in range(100 if smoke else 20_000)
        ),
    )
    made = Made(path, "transactions", 3, count)
    _to_arrow(versus, made, "transactions to record batches, 5 kB")


def test_version_1_to_arrow(versus: Any, smoke: bool, folder: Path) -> None:
    pa = pytest.importorskip("pyarrow", reason="pyarrow is not installed: pip install '.[dev]'")
    path = folder / "layouts.bin"
    made = Made(path, "blocks", 1, _write(path, 1, _layouts(1_000 if smoke else 100_000)))

    def by_events() -> int:
        rows = 0
        with DataStream.open(path, read_only=True) as stream:
            for batch in stream.batches():
                found = [event._asdict() for _, event in decode_batch(batch, version=1)]
                rows += pa.Table.from_pylist(found).num_rows
        return rows

    assert _rows(made) == by_events() == made.count
    versus(
        "blocks of version 1 to record batches",
        lambda: _rows(made),
        {"decode to events, then pyarrow": by_events},
        unit="rows/s",
        amount=made.count,
        at_least=3.0,
    )


def test_events(versus: Any, smoke: bool, folder: Path) -> None:
    """Until all fields are values of Python."""
    pytest.importorskip("google.protobuf", reason="protobuf is not installed")
    from datastreamer.zkevm.proto import datastream_pb2

    path = folder / "blocks.bin"
    count = _write(path, 3, _blocks(1_000 if smoke else 100_000))
    names = [field.name for field in MESSAGES[2].fields if field.name != "debug"]
    with DataStream.open(path, read_only=True) as stream:
        batches = list(stream.batches())

    def ours() -> int:
        return sum(1 for batch in batches for _ in decode_batch(batch, version=3))

    def rival() -> int:
        read = datastream_pb2.L2Block.FromString
        return sum(
            len([getattr(found, name) for name in names]) > 0
            for batch in batches
            for entry in batch
            if (found := read(entry.data))
        )

    assert ours() == rival() == count
    versus(
        "blocks to events, 190 B",
        ours,
        {"protobuf (upb), all fields": rival},
        unit="events/s",
        amount=count,
        at_least=1.0,
    )


def test_opening(versus: Any, signed: list[bytes]) -> None:
    account = import_module("eth_account").Account
    opened = [open_transaction(each) for each in signed]
    assert [f"0x{(each.sender or b'').hex()}" for each in opened] == [
        account.recover_transaction(each).lower() for each in signed
    ]
    versus(
        "transactions opened with their sender, 5 kB",
        lambda: [open_transaction(each) for each in signed],
        {
            "eth-account, the sender alone": lambda: [
                account.recover_transaction(each) for each in signed
            ],
            "ours without the sender": lambda: [
                open_transaction(each, sender=False) for each in signed
            ],
        },
        unit="transactions/s",
        amount=len(signed),
        at_least={"eth-account, the sender alone": 1.0},
    )


def test_recovering(versus: Any, smoke: bool) -> None:
    """The curve alone: which package makes a key of a signature and a hash soonest."""
    coincurve = pytest.importorskip("coincurve", reason="coincurve is not installed")
    keys = pytest.importorskip("eth_keys", reason="eth-keys is not installed")
    count = 10 if smoke else 500
    key, chance = coincurve.PrivateKey(bytes([1]) * 32), random.Random(1)
    hashes = [chance.randbytes(32) for _ in range(count)]
    signatures = [key.sign_recoverable(each, hasher=None) for each in hashes]

    def through(backend: str) -> Any:
        api = keys.KeyAPI(import_module(f"eth_keys.backends.{backend[0]}").__dict__[backend[1]]())
        made = [keys.datatypes.Signature(each) for each in signatures]
        return lambda: [
            api.ecdsa_recover(digest, each) for digest, each in zip(hashes, made, strict=True)
        ]

    versus(
        "keys recovered, coincurve as here",
        lambda: [
            coincurve.PublicKey.from_signature_and_message(each, digest, hasher=None)
            for digest, each in zip(hashes, signatures, strict=True)
        ],
        {
            "eth-keys on coincurve": through(("coincurve", "CoinCurveECCBackend")),
            "eth-keys in Python": through(("native", "NativeECCBackend")),
        },
        unit="keys/s",
        amount=count,
        rounds=3,
        at_least=0.9,
    )
