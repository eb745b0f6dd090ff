"""Where the tests find what they read, in which order they run, and which were skipped and why."""

from __future__ import annotations

import functools
import gc
import gzip
import hashlib
import json
import os
import re
import signal
import sys
import tarfile
from collections import Counter
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

GOLDEN = Path(__file__).resolve().parent / "golden"
ROOT = GOLDEN.parents[1]
REAL = ROOT.parent / "shared" / "real" / "hermez-net8-stream.tar.gz"

# A machine that is busy with something else is no fault of an example.
settings.register_profile("patient", deadline=None)
settings.load_profile("patient")

# A shell starts background jobs with SIGINT ignored, and the tests' processes would inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Where no bytecode is written, each process of a run compiles the package again, and each that
# collects tests rewrites the asserts of all of them.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

# Output has the same width and no color in every environment.
os.environ["COLUMNS"] = "100"
for name in ("GITHUB_ACTIONS", "FORCE_COLOR"):
    os.environ.pop(name, None)
# Where these are set, pytest writes out whole differences; those of streams take minutes.
for name in ("CI", "BUILD_NUMBER"):
    os.environ.pop(name, None)


# What takes longest, the longest first. Parallel processes begin with these files, so that no
# process still works through one of them when the others have ended.
LONGEST = (
    *("spark/test_", "spark/", "world/", "storage/lab/", "interop/", "test_code_blocks", "relay/"),
    *("http/", "server/", "cli/", "client/", "test_"),
)
# Tests that use the one session of Spark run in one process: a session takes seconds to start, and
# is slow at first. Other tests of Spark are left to the other processes.
ONE_SPARK = re.compile(r"\b(spark|native|stateful): Any[,)]")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """As `--dist loadfile`, but for the tests of one session of Spark."""
    from xdist.scheduler import LoadFileScheduling

    @functools.cache
    def scope(file: str) -> str:
        one = file.startswith("tests/spark/") and ONE_SPARK.search((ROOT / file).read_text())
        return "spark" if one else file

    class Scheduling(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return scope(super()._split_scope(nodeid))

    return Scheduling(config, log) if config.getvalue("dist") == "loadfile" else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Order the files, and leave out the tests of `make soak` and `make mutants` unless `-m` names
    one of their markers."""
    here = Path(__file__).parent

    @functools.cache
    def rank(path: Path) -> int:
        name = path.relative_to(here).as_posix() if path.is_relative_to(here) else ""
        ranks = (n for n, start in enumerate(LONGEST) if name.startswith(start))
        return next(ranks, len(LONGEST))

    items.sort(key=lambda item: rank(item.path))
    kept, left_out = [], []
    for item in items:
        markers = [name for name in ("soak", "mutants") if item.get_closest_marker(name)]
        asked = not markers or any(name in config.option.markexpr for name in markers)
        (kept if asked else left_out).append(item)
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = kept


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """What is collected stays to the end: each search for garbage would go through all of it."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.hookimpl(trylast=True)
def pytest_unconfigure(config: pytest.Config) -> None:
    """Print at the end how many tests were skipped, with each reason."""
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    if reporter is None or config.option.collectonly or hasattr(config, "workerinput"):
        return
    reasons = Counter(
        report.longrepr[2].removeprefix("Skipped: ") for report in reporter.getreports("skipped")
    )
    each = [f"{count}, because {reason}" for reason, count in sorted(reasons.items())]
    reporter.write_line("skipped tests: " + ("; ".join(each) or "none"))


@pytest.fixture(scope="session")
def real_stream(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The production node's stream file, unpacked; tests must not write to it."""
    if not REAL.exists():
        pytest.skip(
            "the stream of a production node is not part of this repository, and not at "
            "../shared/real/ beside it"
        )
    folder = tmp_path_factory.mktemp("real")
    with tarfile.open(REAL) as tar:
        for member in tar:
            if member.isfile() and member.name.endswith(".bin"):
                target = folder / Path(member.name).name
                source = tar.extractfile(member)
                assert source is not None
                target.write_bytes(source.read())
                return target
    raise AssertionError("no .bin in the archive of the real stream")


class Golden:
    """The golden data: stream files, their manifests and entries, and the transcripts."""

    def __init__(self, folder: Path, scratch: Path) -> None:
        self.folder = folder
        self.scratch = scratch

    def names(self) -> list[str]:
        return sorted(p.name.split(".")[0] for p in self.folder.glob("*.manifest.json"))

    def manifest(self, name: str) -> dict[str, Any]:
        loaded: dict[str, Any] = json.loads((self.folder / f"{name}.manifest.json").read_text())
        return loaded

    def entries(self, name: str) -> list[dict[str, Any]]:
        lines = (self.folder / f"{name}.entries.jsonl").read_text().splitlines()
        return [json.loads(line) for line in lines]

    def content(self, name: str) -> bytes:
        return gzip.decompress((self.folder / f"{name}.bin.gz").read_bytes())

    def unpack(self, name: str, folder: Path | None = None) -> Path:
        """A fresh copy of a golden stream file in `folder`."""
        target = (folder or self.scratch) / f"{name}.bin"
        target.write_bytes(self.content(name))
        return target

    def database(self, name: str, kind: str = "db") -> Path:
        """A fresh copy of the bookmark database of a golden stream file, as a folder.

        `kind` is "db", or "db-table" for one without a journal, where there is such.
        """
        with tarfile.open(self.folder / f"{name}.{kind}.tar.gz") as tar:
            for member in tar:
                source = tar.extractfile(member)
                if source is not None:
                    target = self.scratch / member.name
                    target.parent.mkdir(exist_ok=True)
                    target.write_bytes(source.read())
        return self.scratch / f"{name}.db"

    def transcript(self, server: str) -> dict[str, list[dict[str, Any]]]:
        """The conversations of one recorded server: name -> steps in order."""
        found: dict[str, list[dict[str, Any]]] = {}
        for line in (self.folder / "wire" / f"{server}.jsonl").read_text().splitlines():
            step = json.loads(line)
            found.setdefault(step["name"], []).append(step)
        return found


@pytest.fixture(scope="session")
def account() -> Any:
    """eth-account, whose import takes seconds, and sets the limit of recursion for the process:
    with its limit, deep JSON overflows the stack of C."""
    limit = sys.getrecursionlimit()
    try:
        return pytest.importorskip("eth_account", reason="eth-account is not installed").Account
    finally:
        sys.setrecursionlimit(limit)


@pytest.fixture
def golden(tmp_path: Path) -> Golden:
    return Golden(GOLDEN, tmp_path)


def make_data(recipe: dict[str, Any]) -> bytes:
    """The data of a recipe: ``{"hex": ..}`` or ``{"fill": seed, "len": n}``."""
    if "hex" in recipe:
        return bytes.fromhex(recipe["hex"])
    block = hashlib.sha256(recipe["fill"].encode()).digest()
    out = bytearray()
    for start in range(0, recipe["len"], 4096):
        out += bytes(b ^ (start // 4096 & 0xFF) for b in block) * 128
    return bytes(out[: recipe["len"]])
