"""`datastreamer`: the operator's tool, as a console script calls it.

Light to import: the program with its verbs is loaded once `run` can answer for it.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from datastreamer.cli.outcome import run

if TYPE_CHECKING:
    import typer


def main(arguments: Sequence[str] | None = None) -> int:
    """Run `datastreamer` with `arguments` (None: the process's); gives the exit code."""
    return run("datastreamer", _program, sys.argv[1:] if arguments is None else arguments)


def _program() -> typer.Typer:
    from datastreamer.cli.program import program

    return program


if __name__ == "__main__":
    sys.exit(main())
