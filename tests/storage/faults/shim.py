"""Processes whose disk refuses, cuts short or forgets what a test says: see ``shim.c``."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from tests.programs import missing

HERE = Path(__file__).parent
EVERY = 0
"""How many calls an action meets: all from then on."""


def why_not() -> str:
    """Why the shim cannot be used here; empty: it can."""
    if not sys.platform.startswith("linux"):
        return "LD_PRELOAD with /proc is Linux's"
    return missing("cc")


def build(folder: Path) -> Path:
    library = folder / "shim.so"
    command = ["cc", "-shared", "-fPIC", "-O1", "-Wall", "-o", library, HERE / "shim.c", "-ldl"]
    subprocess.run([*map(str, command), "-lpthread"], check=True)
    return library


class FaultPlan:
    """The faults of calls on the files that `pattern` matches, if `environment` is set."""

    def __init__(self, library: Path, pattern: str, plan: Path) -> None:
        self._plan = plan
        self.environment = {
            **os.environ,
            "LD_PRELOAD": str(library),
            "FAULT_FILE": pattern,
            "FAULT_PLAN": str(plan),
            "PYTHONPATH": os.pathsep.join(sys.path),
        }
        self._serial = 0

    def fail(
        self, call: str, *, skip: int = 0, count: int = 1, action: int | str = errno.EIO
    ) -> None:
        """From now on `call` (write, sync, truncate, allocate) is met by `action`: an errno,
        "short" or "drop". At first `skip` calls are not, then `count` are (`EVERY`)."""
        # (The number makes it another plan than the one before.)
        self._serial += 1
        begun = self._plan.with_suffix(".begun")
        begun.write_text(f"{call} {skip} {count} {action} {self._serial}\n")
        begun.replace(self._plan)

    def lift(self) -> None:
        """Nothing is refused any more."""
        self._plan.unlink(missing_ok=True)


class Failed(Exception):
    """What the driver's library raised: the name of the class, and its text."""

    def __init__(self, name: str, text: str) -> None:
        super().__init__(f"{name}: {text}")
        self.name = name
        self.text = text


class Driven:
    """A process that does with a stream what `do` says."""

    def __init__(self, plan: FaultPlan) -> None:
        self._process = subprocess.Popen(
            [sys.executable, str(HERE / "driver.py")],
            env=plan.environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def do(self, name: str, *arguments: Any) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps([name, *arguments]) + "\n")
        self._process.stdin.flush()
        failed, answer = json.loads(self._process.stdout.readline())
        if failed is not None:
            raise Failed(failed, answer)
        return answer

    def commit(self, *data: str) -> None:
        for one in data:
            self.do("add", one)
        self.do("commit")

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def __enter__(self) -> Driven:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.kill()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()


def run(plan: FaultPlan, arguments: Sequence[str], given: str) -> subprocess.CompletedProcess[str]:
    """``datastreamer ARGUMENTS`` with `given` as its standard input."""
    return subprocess.run(
        [sys.executable, "-m", "datastreamer", *arguments],
        env=plan.environment,
        input=given,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
