"""The code blocks of README and the documentation run as they stand, or say what they need."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import trustme

from datastreamer import DataStream
from datastreamer.cli.demo import DemoSequencer
from tests.code_blocks import OUTPUT, RUN, code_blocks, isolated

ROOT = Path(__file__).resolve().parent.parent
PAGES = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), ROOT / "bench" / "README.md"]
NOT_RUN = {"", "text"}
MARKS = {"", "until stopped", "in the background"}


def runs(page: Path) -> bool:
    blocks = [block for block in code_blocks(page.read_text()) if block.language in RUN]
    return any(not block.mark.startswith("needs: ") for block in blocks)


def why_not(folder: Path) -> str:
    """Why commands cannot have a network of their own here; "" if they can."""
    try:
        done = subprocess.run(
            isolated(["true"], folder), capture_output=True, text=True, check=False
        )
    except FileNotFoundError as error:
        return f"{error.filename} is not on PATH: install util-linux"
    return done.stderr and f"no network for a process of its own: {done.stderr.strip()}"


@pytest.fixture(scope="module")
def streams(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the folder of each page holds."""
    folder = tmp_path_factory.mktemp("streams")
    if reason := why_not(folder):
        pytest.skip(reason)
    for name in ("stream.bin", "served.bin"):
        with DataStream.create(folder / name, version=3, system_id=1101, sync="os") as stream:
            sequencer = DemoSequencer(stream)
            for _ in range(300):
                sequencer.write()
    ca = trustme.CA()
    certificate = ca.issue_cert("localhost", "127.0.0.1", "stream.example")
    certificate.cert_chain_pems[0].write_to_path(folder / "cert.pem")
    key = folder / "key.pem"
    key.touch(mode=0o600)
    certificate.private_key_pem.write_to_path(key)
    for name in ("ca.pem", "clients-ca.pem"):
        ca.cert_pem.write_to_path(folder / name)
    for name in ("token", "tokens"):
        path = folder / name
        path.touch(mode=0o600)
        path.write_text("a-token-of-the-documentation\n")
    return folder


@pytest.fixture(scope="module")
def runner(streams: Path) -> Iterator[subprocess.Popen[str]]:
    """The process that runs pages."""
    words = [sys.executable, "-W", "error", "-m", "tests.code_blocks"]
    search = f"{sys.prefix}/bin:{os.environ['PATH']}"
    with subprocess.Popen(
        isolated(words, streams),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env={
            **os.environ,
            "PATH": search,
            "PYTHONPATH": str(ROOT),
            **dict.fromkeys(("XDG_CONFIG_HOME", "XDG_STATE_HOME"), str(streams)),
        },
    ) as process:
        yield process
        assert process.stdin
        process.stdin.close()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_each_block_runs_or_says_what_it_needs(page: Path) -> None:
    for block in code_blocks(page.read_text()):
        known = block.language in RUN or block.language in NOT_RUN
        assert known or block.mark.startswith("needs: "), (block.line, block.language)
        marked = block.mark in MARKS or block.mark.startswith("needs: ")
        assert marked, (block.line, block.mark)


MYPY = """[mypy]
strict = true
scripts_are_modules = true
follow_imports = silent
explicit_package_bases = true
[mypy-chain,pyarrow,pyarrow.*]
ignore_missing_imports = true
"""


def test_blocks_that_run_have_the_types_that_they_show(tmp_path: Path) -> None:
    """As mypy sees them, strictly."""
    for page in PAGES:
        for block in code_blocks(page.read_text()):
            if block.language == "python" and not block.mark.startswith("needs: "):
                (tmp_path / f"{page.stem}_{block.line}.py").write_text(block.text)
    (tmp_path / "mypy.ini").write_text(MYPY)
    words = [sys.executable, "-m", "mypy", "--config-file", "mypy.ini", "--no-incremental"]
    done = subprocess.run(
        [*words, *sorted(path.name for path in tmp_path.glob("*.py"))],
        check=False,
        cwd=tmp_path,
        env={**os.environ, "MYPYPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_blocks_of_the_readme_can_be_pasted_into_a_prompt() -> None:
    """There an empty line ends a block."""
    for block in code_blocks((ROOT / "README.md").read_text()):
        if block.language == "python":
            assert "\n\n " not in block.text, block.line


@pytest.mark.parametrize(
    "page", list(filter(runs, PAGES)), ids=lambda page: str(page.relative_to(ROOT))
)
def test_blocks_run(
    page: Path, streams: Path, runner: subprocess.Popen[str], tmp_path: Path
) -> None:
    folder = tmp_path / "here"
    shutil.copytree(streams, folder)
    (folder / ".venv").symlink_to(sys.prefix)
    assert runner.stdin
    assert runner.stdout
    runner.stdin.write(json.dumps([str(page), str(folder)]) + "\n")
    runner.stdin.flush()
    assert runner.stdout.readline() == "0\n", (folder / OUTPUT).read_text()
