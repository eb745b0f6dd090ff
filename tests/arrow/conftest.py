"""Streams to be read as Arrow, and the independent scan that counts are held against."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

from datastreamer.storage.stream import DataStream

pytest.importorskip("pyarrow", reason="pyarrow is not installed: pip install 'datastreamer[arrow]'")

Make = Callable[..., Path]


@pytest.fixture
def make(tmp_path: Path) -> Make:
    """``make([(type, data), ...], version=2)``: a stream file of these entries."""

    def make(
        entries: Iterable[tuple[int, bytes]], version: int = 2, name: str = "made.bin"
    ) -> Path:
        path = tmp_path / name
        with (
            DataStream.create(path, version=version, system_id=7, sync="os") as stream,
            stream.atomic_op() as op,
        ):
            for kind, data in entries:
                if kind == 0xB0:
                    op.add_bookmark(data)
                else:
                    op.add_entry(kind, data)
        return path

    return make
