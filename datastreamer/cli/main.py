"""`datastreamer`: the entry point of the operator's tool.

Light to import: signals are handled first, then `run` loads the program with its commands.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from datastreamer._version import __version__

if TYPE_CHECKING:
    import typer


def main(arguments: Sequence[str] | None = None) -> int:
    """Run `datastreamer` with `arguments` (None: the process's); returns the exit code."""
    given = sys.argv[1:] if arguments is None else arguments
    if arguments is None:
        from datastreamer.cli import early_signals

        early_signals.install(expected=_runs_until_signal(given))
        if [*given] == ["--version"]:
            # The one question that needs no command line parser.
            print("datastreamer", __version__)
            return 0
    from datastreamer.cli.shared.exit_codes import guard, run

    if arguments is None and (line := os.environ.get("_DATASTREAMER_COMPLETE")):
        return guard(lambda: _complete(line))
    return run("datastreamer", _program, given)


def _runs_until_signal(arguments: Sequence[str]) -> bool:
    """Whether a signal is the normal end of this command."""
    words = iter(arguments)
    for word in words:
        if word in ("--log-level", "--log-format"):
            next(words, None)
        elif not word.startswith("-"):
            if any(
                each.partition("=")[0] in ("--count", "--to", "--to-bookmark") for each in words
            ):
                return False  # there is a last entry, or update
            if word in ("cat", "reassemble"):
                return "--follow" in arguments
            return word in ("serve", "relay", "tail", "top")
    return False


def _complete(line: str) -> int:
    """Print what may follow a command line, for the script of a shell."""
    from datastreamer.cli.commands.completion import completions
    from datastreamer.cli.program import commands
    from datastreamer.cli.shared.exit_codes import write_raw

    write_raw("".join(f"{each}\n" for each in completions(line, commands())).encode())
    return 0


def _program() -> typer.Typer:
    from datastreamer.cli.program import program

    return program


if __name__ == "__main__":
    sys.exit(main())
