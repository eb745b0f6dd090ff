"""What a command says and asks before it destroys what no other command brings back."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Annotated

import typer

from datastreamer.cli.shared import logs
from datastreamer.cli.shared.exit_codes import Failure


@dataclass(frozen=True)
class Consent:
    """The options of a command that destroys, a group."""

    yes: Annotated[bool, typer.Option("--yes", help="Do not ask for confirmation.")] = False
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print what would be done, and change nothing.")
    ] = False

    def require(self, loss: str, question: str = "Remove them?") -> None:
        """Return if the user consents: by --yes, or by an answer on the terminal. `loss` says
        what is lost. Raises `Failure`: nothing was changed."""
        if self.yes:
            return
        streams = (sys.stdin, sys.stderr)
        if not all(stream is not None and stream.isatty() for stream in streams):
            raise Failure(f"{loss}; nothing was changed: run it on a terminal, or with --yes")
        logs.say(loss)
        logs.say(f"{question} [y/N]")
        if sys.stdin.readline().strip().lower() not in ("y", "yes"):
            raise Failure("not confirmed; nothing was changed")
