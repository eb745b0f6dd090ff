"""``spark ingest``, beside the library of the curve alone, which recovers the senders of the same
transactions with a thread on each core: the limit, as the tables have the senders."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from bench.spark_session import CORES, local_session
from datastreamer import DataStream
from datastreamer.spark import Ingest
from datastreamer.zkevm import L2Block, Transaction, encode
from datastreamer.zkevm._rlp import rlp_bytes, rlp_list, rlp_number

coincurve = pytest.importorskip("coincurve", reason="coincurve is not installed")

_OF_BLOCK = 10
_DIGEST = bytes(range(32))
_CALL = bytes.fromhex("a9059cbb") + bytes(12) + b"t" * 20 + bytes(32)


class Signed(NamedTuple):
    path: Path
    signatures: list[bytes]


@pytest.fixture(scope="module")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with local_session(tmp_path_factory.mktemp("scratch")) as made:
        yield made


@pytest.fixture(scope="module")
def signed(tmp_path_factory: pytest.TempPathFactory, request: Any) -> Iterator[Signed]:
    """Blocks of ten transactions, each with a signature that a key has made."""
    blocks = 10 if request.config.getoption("benchmark_disable") else 10_000
    folder = tmp_path_factory.mktemp("signed")
    key = coincurve.PrivateKey(bytes([1]) * 32)
    signatures = [
        key.sign_recoverable(number.to_bytes(32, "big"), hasher=None)
        for number in range(blocks * _OF_BLOCK)
    ]
    with DataStream.create(folder / "stream.bin", version=3, sync="os", index="memory") as made:
        for first in range(0, blocks, 1_000):
            with made.atomic_op() as op:
                for number in range(first, min(blocks, first + 1_000)):
                    op.add_entry(*encode(L2Block(number, timestamp=number), version=3))
                    for index in range(_OF_BLOCK):
                        place = number * _OF_BLOCK + index
                        own = Transaction(number, index, True, _encoded(place, signatures[place]))
                        op.add_entry(*encode(own, version=3))
    yield Signed(folder / "stream.bin", signatures)
    shutil.rmtree(folder)


def _encoded(nonce: int, signature: bytes) -> bytes:
    v = 2 * 1101 + 35 + signature[64]
    r, s = (int.from_bytes(signature[at : at + 32], "big") for at in (0, 32))
    numbers = [rlp_number(each) for each in (nonce, 10**9, 60_000)]
    return rlp_list(
        b"".join([*numbers, rlp_bytes(b"t" * 20), rlp_number(0), rlp_bytes(_CALL)])
        + b"".join(rlp_number(each) for each in (v, r, s))
    )


def test_ingest(versus: Any, spark: Any, signed: Signed, tmp_path: Path) -> None:
    made = iter(range(100))

    def ingest() -> None:
        tables = Ingest(spark, {"path": str(signed.path)}, tmp_path / str(next(made)))
        assert tables.backfill() > len(signed.signatures)
        tables.close()

    def recover(part: int) -> None:
        public_key = coincurve.PublicKey.from_signature_and_message
        for signature in signed.signatures[part::CORES]:
            public_key(signature, _DIGEST, hasher=None)

    def recovered() -> None:
        with ThreadPoolExecutor(CORES) as threads:
            list(threads.map(recover, range(CORES)))

    versus(
        "spark ingest, blocks of ten transactions",
        ingest,
        {"the curve's library alone": recovered},
        unit="transactions/s",
        amount=len(signed.signatures),
        rounds=3,
        at_least=0.4,
    )
