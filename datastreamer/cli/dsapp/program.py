"""The `dsapp` program."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from datastreamer.cli.commands.building import expand, new_program
from datastreamer.cli.commands.classes import ProgramGroup, VerbCommand
from datastreamer.cli.dsapp.client import client
from datastreamer.cli.dsapp.relay import relay
from datastreamer.cli.dsapp.server import server

_HELP = "help, h"


class _Group(ProgramGroup):
    """The program, whose help has two names."""

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        return super().get_command(ctx, _HELP if cmd_name in _HELP.split(", ") else cmd_name)


program = new_program(
    "Run a demo server, client or relay of a stream; for operators, see datastreamer.", {}, _Group
)


@program.command(_HELP)
def show_help(
    context: typer.Context,
    command: Annotated[str | None, typer.Argument(help="Command of dsapp.")] = None,
) -> None:
    """Show the help of a command."""
    above = context.parent
    assert above is not None
    if command is None:
        typer.echo(above.get_help())
        return
    known = typer.main.get_group(program).get_command(above, command)
    if known is None:
        raise typer.BadParameter(f"no such command {command!r}")
    with known.make_context(command, [], parent=above, resilient_parsing=True) as its:
        typer.echo(its.get_help())


for verb in (server, client, relay):
    program.command(cls=VerbCommand)(expand(verb))
