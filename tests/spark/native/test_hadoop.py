"""Files of other file systems: Python plans them with `pyarrow.fs`, Java reads them with Hadoop's.

S3A is not on the class path of PySpark, so Hadoop's view of a local folder is in its place.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("moto", reason="moto is not installed: pip install '.[dev]'")

from tests.spark.native.comparing import frame, python_parts, rows_of
from tests.spark.native.fuzz import write_stream
from tests.spark.read.reading import Query
from tests.spark.read.test_remote_file import Bucket, bucket, storage

__all__ = ["bucket", "storage"]


def test_a_uri_is_read_through_hadoop(native: Any, bucket: Bucket, tmp_path: Path) -> None:
    path = tmp_path / "stream.bin"
    write_stream(path, random.Random(5), 3)
    uri = bucket.put("streams/stream.bin", path)
    expected = Query(path=uri).rows()
    unread = frame(native, path=uri)
    # Hadoop does not know the scheme, so Python reads all parts.
    assert rows_of(unread) == expected
    assert python_parts(unread) == 1

    settings = {
        "fs.s3.impl": "org.apache.hadoop.fs.viewfs.ViewFileSystemOverloadScheme",
        "fs.viewfs.overload.scheme.target.s3.impl": "org.apache.hadoop.fs.LocalFileSystem",
        f"fs.viewfs.mounttable.{bucket.name}.link./streams": f"file://{tmp_path}",
    }
    conf = native.sparkContext._jsc.sc().conf()
    for name, value in settings.items():
        conf.set(f"spark.hadoop.{name}", value)
    try:
        found = frame(native, path=uri)
        assert rows_of(found) == expected
        assert python_parts(found) == 0
    finally:
        for name in settings:
            conf.remove(f"spark.hadoop.{name}")
