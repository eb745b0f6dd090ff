"""`dsapp`: the demo program, with the options that users of the Go program know.

Light to import, see `datastreamer.cli.main`.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import typer


def main(arguments: Sequence[str] | None = None) -> int:
    """Run `dsapp` with `arguments` (None: the process's); returns the exit code."""
    given = sys.argv[1:] if arguments is None else arguments
    if arguments is None:
        from datastreamer.cli import early_signals

        serves = bool(given) and given[0] in ("server", "client", "relay")
        early_signals.install(expected=serves)
    from datastreamer.cli.shared.exit_codes import run

    # Go programs accept -port for --port.
    return run("dsapp", _program, [re.sub("^-(?=[a-z]{2})", "--", word) for word in given])


def _program() -> typer.Typer:
    from datastreamer.cli.dsapp.program import program

    return program
