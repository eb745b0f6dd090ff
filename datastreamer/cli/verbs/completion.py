"""`datastreamer completion`: the completion script of a shell."""

from __future__ import annotations

from typing import Annotated, Literal

import typer

from datastreamer.cli.commands.completion import SCRIPTS
from datastreamer.cli.shared.exit_codes import write_raw

ShellArgument = Annotated[
    Literal["bash", "zsh", "fish"], typer.Argument(metavar="SHELL", help="bash, zsh or fish.")
]


def completion(shell: ShellArgument) -> None:
    """Print the completion script of a shell.

    It completes commands, options and their values, files, contexts, and servers that a command on
    a terminal has connected to before.

    Examples:
      source <(datastreamer completion bash)    # in ~/.bashrc; zsh likewise
      datastreamer completion fish > ~/.config/fish/completions/datastreamer.fish
    """
    write_raw(SCRIPTS[shell].encode())
