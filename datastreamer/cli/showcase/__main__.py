"""The showcase as a program."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from datastreamer.cli.shared.exit_codes import run

if TYPE_CHECKING:
    import typer


def _program() -> typer.Typer:
    from datastreamer.cli.shared.options import new_program
    from datastreamer.cli.showcase.play import showcase

    program = new_program()
    program.command()(showcase)
    return program


if __name__ == "__main__":
    sys.exit(run("showcase", _program, sys.argv[1:]))
