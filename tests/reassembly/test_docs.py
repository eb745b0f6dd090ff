"""The examples of docs/REASSEMBLY.md run unchanged."""

from __future__ import annotations

import re
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

from datastreamer import DataStream, StreamServer
from datastreamer.reassembly import Producer

ROOT = Path(__file__).resolve().parent.parent.parent


def examples() -> list[str]:
    text = (ROOT / "docs" / "REASSEMBLY.md").read_text()
    return re.findall(r"```python\n(.*?)```", text, re.DOTALL)


def messages_for(path: Path) -> None:
    """One payload, in a stream."""
    own = b"i" * 32
    with DataStream.create(path, index="memory") as stream:
        Producer(stream).publish(own, {b"\x01" + own: b"some bytes"})


def run(program: str) -> str:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", program],
        check=False,
        capture_output=True,
        text=True,
        timeout=60,
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_splitting_and_reassembling() -> None:
    printed = run(examples()[0])
    assert printed.startswith("b'id of the block, 32 bytes of it.' [(b'\\x01id of")
    assert printed.count("tx") == 2
    assert printed.endswith("{'one producer': 4}\n")


def test_ordering() -> None:
    assert run(examples()[2]).split("\n")[:3] == [
        "apply b'a1'",
        "apply b'a2'",
        (
            "back [(Block(number=2, hash=b'a2', parent=b'a1', weight=None), b'a2')] then "
            "[(Block(number=2, hash=b'b2', parent=b'a1', weight=None), b'b2'), "
            "(Block(number=3, hash=b'b3', parent=b'b2', weight=None), b'b3')]"
        ),
    ]


def test_from_several_servers(tmp_path: Path) -> None:
    paths = [tmp_path / name for name in ("a.bin", "b.bin")]
    program = examples()[1].replace("async for payload in payloads:", "if True:")
    program = program.replace("print(payload.id", "payload = await payloads.__anext__()\n"
                              "                print(payload.id")  # fmt: skip
    program = program.replace("progress.db", str(tmp_path / "progress.db"))
    for path in paths:
        messages_for(path)
    with ExitStack() as stack:
        for host, path in zip("ab", paths, strict=True):
            server = StreamServer(path, host="127.0.0.1", port=0, in_process=True)
            port = stack.enter_context(server).port
            program = program.replace(f'("{host}", 6900)', f'("127.0.0.1", {port})')
        assert run(program) == f"{b'i' * 32!r} 1\n"
