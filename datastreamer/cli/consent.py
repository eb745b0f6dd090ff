"""What a command says and asks before it removes committed entries."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Annotated

import typer

from datastreamer.cli.shared import logs
from datastreamer.cli.shared.exit_codes import Failure


@dataclass(frozen=True)
class Consent:
    """The options of a command that removes entries, a group."""

    yes: Annotated[
        bool, typer.Option("--yes", help="Remove entries without asking; for scripts.")
    ] = False
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print what would be done, and change nothing.")
    ] = False

    def require(self, loss: str) -> None:
        """Return if the user consents: by --yes, or by an answer on the terminal. `loss` says
        what is removed. Raises `Failure`: nothing was changed."""
        if self.yes:
            return
        streams = (sys.stdin, sys.stderr)
        if not all(stream is not None and stream.isatty() for stream in streams):
            raise Failure(f"{loss}; nothing was changed: run it on a terminal, or with --yes")
        logs.say(loss)
        logs.say("Remove them? [y/N]")
        if sys.stdin.readline().strip().lower() not in ("y", "yes"):
            raise Failure("not confirmed; nothing was changed")
