"""`datastreamer sums`: the checksums beside a file, made and accepted."""

from __future__ import annotations

import json
from pathlib import Path

from datastreamer import DataStream
from tests.cli.conftest import Invoke
from tests.storage.made import FIRST, PAGE


def made(path: Path, pages: int = 3) -> Path:
    with DataStream.create(path, index="memory") as stream:
        for number in range(3 * pages + 1):
            with stream.atomic_op() as op:
                op.add_entry(1, bytes([number]) * 300_000)
    return path


def test_missing_checksums_are_made(invoke: Invoke, tmp_path: Path) -> None:
    path = made(tmp_path / "s.bin")
    assert json.loads(invoke("sums", path, "--json").out) == {
        "pages": 3,
        "made": 0,
        "damaged": 0,
        "refuted": "",
    }
    sidecar = Path(f"{path}.sums")
    before = sidecar.read_bytes()
    sidecar.unlink()
    assert json.loads(invoke("sums", path, "--json").out)["made"] == 3
    assert sidecar.read_bytes() == before
    assert (
        "3 whole pages, 0 new checksums" in invoke("sums", path, "--format", "table").out.decode()
    )


def test_what_the_file_holds_is_accepted(invoke: Invoke, tmp_path: Path) -> None:
    path = made(tmp_path / "s.bin")
    content = bytearray(path.read_bytes())
    content[FIRST + PAGE + 999] ^= 8
    path.write_bytes(content)
    invoke("sums", path)
    failed = invoke("verify", path, "--json")
    assert failed.code == 3
    (problem,) = json.loads(failed.out)["problems"]
    assert problem["where"] == f"byte {FIRST + PAGE}"
    assert problem["what"].startswith("page 1 (entries 3 to 5): the entries do not match")
    sidecar = Path(f"{path}.sums")
    before = sidecar.read_bytes(), path.read_bytes()
    refused = invoke("sums", path, "--accept").failed()
    assert "takes 1 problem for right, permanently; the first is page 1 (entries 3 to 5)" in refused
    assert refused.endswith("nothing was changed: run it on a terminal, or with --yes")
    planned = invoke("sums", path, "--accept", "--dry-run", "--json")
    assert planned.objects == [{"changed": False, "problems": [problem]}]
    assert (sidecar.read_bytes(), path.read_bytes()) == before
    assert json.loads(invoke("sums", path, "--accept", "--yes", "--json").out)["made"] == 3
    assert json.loads(invoke("verify", path, "--json").out)["ok"]
    # There is nothing to lose any more.
    assert json.loads(invoke("sums", path, "--accept", "--json").out)["made"] == 3


def test_a_page_that_cannot_be_read(invoke: Invoke, tmp_path: Path) -> None:
    path = made(tmp_path / "s.bin")
    content = bytearray(path.read_bytes())
    content[FIRST + PAGE] = 7
    path.write_bytes(content)
    Path(f"{path}.sums").unlink()
    failed = invoke("sums", path, "--json")
    assert failed.code == 3
    assert json.loads(failed.out) == {"pages": 3, "made": 3, "damaged": 1, "refuted": ""}
    assert "1 page cannot be read as entries" in failed.err.splitlines()[-1]


def test_wrong_turns(invoke: Invoke, tmp_path: Path) -> None:
    assert "no such file" in invoke("sums", tmp_path / "none.bin").failed()
    path = made(tmp_path / "s.bin", 1)
    assert "--dry-run requires --accept" in invoke("sums", path, "--dry-run").failed(2)
    with DataStream.open(path, index="memory"):
        assert "locked by another writer" in invoke("sums", path).failed()
