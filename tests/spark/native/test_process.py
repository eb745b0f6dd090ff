"""The process that answers the reader in Java."""

from __future__ import annotations

import io
import json
import re
import struct
from pathlib import Path
from typing import Any

import pytest

from datastreamer.spark.native import plans
from datastreamer.spark.native.process import PROTOCOL, serve
from datastreamer.spark.options import read_options
from datastreamer.spark.read.schemas import table_schema
from tests.spark.conftest import Make
from tests.spark.settings import ROOT


def answer(protocol: str, **request: Any) -> tuple[bytes, bytes]:
    """The letter and the content of the last frame."""
    packed, answers = json.dumps(request).encode(), io.BytesIO()
    serve(io.BytesIO(struct.pack(">I", len(packed)) + packed), answers, protocol)
    letter, size = struct.unpack(">cI", answers.getvalue()[:5])
    return letter, answers.getvalue()[5 : 5 + size]


@pytest.mark.parametrize("protocol", ["", "1", "5"])
def test_a_jar_of_another_version_is_refused(protocol: str) -> None:
    letter, content = answer(protocol, do="schema", options={"path": "/nowhere"})
    assert letter == b"E"
    assert b"the reader in Java is of another version than the package" in content
    assert b"Traceback" not in content


def test_the_jar_speaks_the_version_of_the_package() -> None:
    source = ROOT / "jvm/src/main/java/datastreamer/spark/PythonProcess.java"
    assert re.findall(r'String PROTOCOL = "(.*)"', source.read_text()) == [PROTOCOL]


def test_counts_of_many_files(make: Make, tmp_path: Path) -> None:
    """Of the plan that was made first, as long as its files are as they were."""
    for at in range(30):
        make([(9, b"x")] * at, name=f"{at:02}.bin")
    options = {"path": str(tmp_path)}
    schema = table_schema(read_options(options), system_id=True).json()
    request = {"options": options, "table": schema, "plan": None, "tasks": 2}
    first = plans.count(request)
    assert first["count"] == sum(range(30))
    (tmp_path / "07.bin").unlink()
    assert plans.count(request)["count"] == sum(range(30)) - 7
    with pytest.raises(Exception, match=r"07\.bin"):
        plans.count({**request, "plan": first["plan"]})


@pytest.mark.parametrize("options", [{"table": "blocks"}, {"mode": "PERMISSIVE"}, {"types": "9"}])
def test_what_headers_do_not_count(make: Make, options: dict[str, str]) -> None:
    given = {"path": str(make([(9, b"x")])), **options}
    assert plans.count({"options": given, "table": "{}", "plan": None}) == {"count": None}
