"""What `import datastreamer` costs, in a fresh interpreter, and what it offers."""

from __future__ import annotations

import subprocess
import sys

import pytest

import datastreamer

HEAVY = [
    *("trio", "lmdb", "pyarrow", "pyspark", "typer", "rich", "xxhash", "numpy"),
    *("asyncio", "socket", "ssl", "logging", "datastreamer._codec"),
    *("google.protobuf", "coincurve", "sha3"),
]


def fresh(program: str, *words: str) -> str:
    """What `program` prints in an interpreter that has loaded nothing else."""
    done = subprocess.run(
        [sys.executable, "-c", program, *words], check=False, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_import_loads_nothing_heavy() -> None:
    # What the interpreter loads by itself (an editable install's finder, say) is not ours.
    program = (
        "import sys; before = set(sys.modules); import datastreamer; "
        f"print(*[m for m in {HEAVY} if m in sys.modules and m not in before])"
    )
    assert fresh(program) == ""


def test_notices_a_heavy_import() -> None:
    program = f"import sys, datastreamer, socket; print(*[m for m in {HEAVY} if m in sys.modules])"
    assert "socket" in fresh(program).split()


@pytest.mark.parametrize("name", datastreamer.__all__)
def test_every_public_name_is_there(name: str) -> None:
    assert getattr(datastreamer, name) is not None
    assert name in dir(datastreamer)


# Imports each name that is given in a fork of an interpreter that has loaded nothing else of the
# package, and prints the names that fail.
EACH_ALONE = """
import asyncio, logging, os, ssl, sys, trio
for name in sys.argv[1:]:
    child = os.fork()
    if child == 0:
        try:
            exec(f"from datastreamer import {name}")
        except BaseException as error:
            os.write(1, f"{name}: {error!r}\\n".encode())
        os._exit(0)
    if os.waitpid(child, 0)[1]:
        print(name, "ended the process", flush=True)
"""


def test_every_public_name_alone_in_a_fresh_interpreter() -> None:
    # One name must not lean on another one having been loaded before.
    assert fresh(EACH_ALONE, *datastreamer.__all__) == ""


def test_notices_a_name_that_cannot_be_imported() -> None:
    assert fresh(EACH_ALONE, "DataStream", "Nothing").startswith("Nothing: ImportError(")


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'no_such_name'"):
        datastreamer.no_such_name  # noqa: B018


def test_errors_cost_nothing_either() -> None:
    program = (
        "import sys, datastreamer.errors, datastreamer.format; "
        f"print(*[m for m in {HEAVY} if m in sys.modules])"
    )
    assert fresh(program) == ""
