"""`datastreamer`: the operator's tool, as a console script calls it.

Light to import: the program with its verbs is loaded once `run` can answer for it, and
`run` itself once signals are seen to.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import typer


def main(arguments: Sequence[str] | None = None) -> int:
    """Run `datastreamer` with `arguments` (None: the process's); gives the exit code."""
    given = sys.argv[1:] if arguments is None else arguments
    if arguments is None:
        from datastreamer.cli import early_signals as early

        if _ends_well(given):
            early.end_well_from_now_on()
        else:
            early.fail_from_now_on()
    from datastreamer.cli.shared.exit_codes import run

    return run("datastreamer", _program, given)


def _ends_well(arguments: Sequence[str]) -> bool:
    """Whether a signal is the good end of what is asked for."""
    words = iter(arguments)
    for word in words:
        if word in ("--log-level", "--log-format"):
            next(words, None)
        elif not word.startswith("-"):
            ends_well = word in ("serve", "relay", "demo", "top")
            return ends_well or (word in ("cat", "reassemble", "spark") and "--follow" in arguments)
    return False


def _program() -> typer.Typer:
    from datastreamer.cli.program import program

    return program


if __name__ == "__main__":
    sys.exit(main())
