"""The process that answers the reader in Java."""

from __future__ import annotations

import io
import json
import re
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from datastreamer.spark.native import plans
from datastreamer.spark.native.process import PROTOCOL, serve
from datastreamer.spark.options import read_options
from datastreamer.spark.read.schemas import table_schema
from datastreamer.spark.stream.offsets import StreamOffset
from datastreamer.zkevm import L2Block, encode
from tests.spark.conftest import Make
from tests.spark.settings import ROOT


def answer(protocol: str, **request: Any) -> tuple[bytes, bytes]:
    """The letter and the content of the last frame."""
    packed, answers = json.dumps(request).encode(), io.BytesIO()
    serve(io.BytesIO(struct.pack(">I", len(packed)) + packed), answers, protocol)
    letter, size = struct.unpack(">cI", answers.getvalue()[:5])
    return letter, answers.getvalue()[5 : 5 + size]


@pytest.mark.parametrize("protocol", ["", "1", "4"])
def test_a_jar_of_another_version_is_refused(protocol: str) -> None:
    letter, content = answer(protocol, do="schema", options={"path": "/nowhere"})
    assert letter == b"E"
    assert b"the reader in Java is of another version than the package" in content
    assert b"Traceback" not in content


def test_the_jar_speaks_the_version_of_the_package() -> None:
    source = ROOT / "jvm/src/main/java/datastreamer/spark/PythonProcess.java"
    assert re.findall(r'String PROTOCOL = "(.*)"', source.read_text()) == [PROTOCOL]


def test_a_process_that_waits_for_rows_ends_with_its_jvm(make: Make) -> None:
    """Of which it notices the end of its requests alone."""
    options = {"path": str(make([(9, b"x")]))}
    schema = table_schema(read_options(options), system_id=False).json()
    start = json.dumps(StreamOffset(0).as_json())
    request = {"do": "live", "options": options, "schema": schema, "start": start}
    packed = json.dumps(request).encode()
    process = subprocess.Popen(
        [sys.executable, "-m", "datastreamer.spark.native.process", PROTOCOL],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd=ROOT,
    )
    with process:
        try:
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.write(struct.pack(">I", len(packed)) + packed)
            process.stdin.flush()
            assert process.stdout.read(1) == b"A"
            process.stdin.close()
            assert process.wait(60) == 0
        finally:
            process.kill()


def test_counts_of_many_files(make: Make, tmp_path: Path) -> None:
    """Of the plan that was made first, as long as its files are as they were."""
    for at in range(30):
        make([(9, b"x")] * at, name=f"{at:02}.bin")
    options = {"path": str(tmp_path)}
    schema = table_schema(read_options(options), system_id=True).json()
    functions = [["count", None]]
    request = {"options": options, "table": schema, "plan": None, "functions": functions}
    first = plans.aggregate(request)
    assert first["values"] == [sum(range(30))]
    (tmp_path / "07.bin").unlink()
    assert plans.aggregate(request)["values"] == [sum(range(30)) - 7]
    with pytest.raises(Exception, match=r"07\.bin"):
        plans.aggregate({**request, "plan": first["plan"]})


def _values(options: dict[str, str], *functions: tuple[str, str | None]) -> Any:
    schema = table_schema(read_options(options), system_id=True).json()
    request = {"options": options, "table": schema, "plan": None, "functions": functions}
    return plans.aggregate(request)["values"]


def test_what_is_for_tasks(make: Make) -> None:
    """What the header, the summaries of pages and a few pages do not say."""
    few = [(9, b"x"), encode(L2Block(7), version=2)]
    path = str(make(few))
    count = ("count", None)
    assert _values({"path": path, "mode": "PERMISSIVE"}, count) is None
    assert _values({"path": path, "types": "2", "prefixes": "9:0x78"}, count) is None
    assert _values({"path": path, "table": "blocks"}, ("max", "entry_number")) is None
    assert _values({"path": path}, ("max", "number")) is None
    assert _values({"path": path}, count) == [2]
    assert _values({"path": path, "types": "9"}, count) == [1]
    assert _values({"path": path, "table": "batches"}, count, ("min", "number")) == [0, None]
    assert _values({"path": path, "table": "blocks"}, ("max", "number"), count) == [7, 1]
    many = str(make([*few, (9, bytes(700_000))] * 20, name="many.bin"))
    summed_up_elsewhere = Path(f"{many}.pages")
    summed_up_elsewhere.unlink(missing_ok=True)
    assert _values({"path": many, "table": "blocks"}, count) is None
    bad = str(make([(2, b"\x08")], name="bad.bin"))
    assert _values({"path": bad, "table": "blocks"}, count) is None
