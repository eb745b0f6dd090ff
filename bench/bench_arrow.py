"""Arrow and Parquet: runs to record batches, and a whole export.

The export's rival is pyarrow writing the same table, which it has in memory; both sync what they
have written. ``ARROW_BENCH_MB`` says how large the stream is (200; the promise is for 1,000).
"""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from datastreamer import DataStream

pa = pytest.importorskip("pyarrow", reason="pyarrow is not installed: pip install '.[dev]'")
pq = pytest.importorskip("pyarrow.parquet")

from datastreamer import arrow  # noqa: E402
from datastreamer.arrow.parquet import PartWriter  # noqa: E402
from datastreamer.position import Identity, Position  # noqa: E402
from datastreamer.storage.disk.access import Access  # noqa: E402

_SIZE = 200
_DATA = _SIZE - 17
_OPERATION = 10_000


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory, request: Any) -> Iterator[Path]:
    """A stream of entries of 200 bytes, of which zstd can save a half."""
    smoke = request.config.getoption("benchmark_disable")
    megabytes = 2 if smoke else int(os.environ.get("ARROW_BENCH_MB", "200"))
    folder = tmp_path_factory.mktemp("plain")
    chance = random.Random(1)
    noise = chance.randbytes(1 << 20)
    with DataStream.create(folder / "plain.bin", sync="os") as stream:
        for _ in range(megabytes * 1_000_000 // _SIZE // _OPERATION):
            places = [chance.randrange(len(noise) - 100) for _ in range(_OPERATION)]
            with stream.atomic_op() as op:
                op.add_entries(3, [noise[at : at + 100] + bytes(_DATA - 100) for at in places])
    yield folder / "plain.bin"
    shutil.rmtree(folder)


def _rows(path: Path, table: str) -> int:
    return sum(batch.num_rows for batch in arrow.ArrowStream(path, table).reader())


def test_entries(versus: Any, plain: Path) -> None:
    size = plain.stat().st_size
    with DataStream.open(plain, read_only=True) as stream:
        versus(
            "entries to record batches, 200 B",
            lambda: _rows(plain, "entries"),
            {"scan alone": lambda: sum(len(batch) for batch in stream.batches())},
            unit="GB/s",
            amount=size / 1e9,
        )


def test_export(versus: Any, plain: Path, tmp_path: Path) -> None:
    table = arrow.ArrowStream(plain).reader().read_all()
    size = plain.stat().st_size
    place = Position(table.num_rows, b"", Identity(1, 0, 1))

    def ours() -> None:
        arrow.export(plain, tmp_path / "ours", part_bytes=1 << 40)
        shutil.rmtree(tmp_path / "ours")

    def rival() -> None:
        """The same rows in the same form, from memory."""
        folder = tmp_path / "same"
        folder.mkdir()
        writer = PartWriter(folder, "entries", table.schema, Access.by_umask())
        for batch in table.to_batches():
            writer.write(batch)
        writer.publish(folder / "part.parquet", 0, place, None, [])
        shutil.rmtree(folder)

    def plain_rival() -> None:
        path = tmp_path / "plain.parquet"
        pq.write_table(table, path, compression="zstd")
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)
        path.unlink()

    versus(
        "export to Parquet, 200 B",
        ours,
        {
            "pyarrow, from memory, defaults, zstd": plain_rival,
            "pyarrow, from memory, the same form": rival,
        },
        unit="GB/s",
        amount=size / 1e9,
        rounds=3,
        at_least={
            "pyarrow, from memory, defaults, zstd": 1 / 1.2,
            "pyarrow, from memory, the same form": 1 / 1.2,
        },
    )
