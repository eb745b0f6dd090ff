"""The `dsapp` program."""

from __future__ import annotations

from typing import Annotated

import typer

from datastreamer.cli.commands.building import expand, new_program
from datastreamer.cli.commands.classes import VerbCommand
from datastreamer.cli.dsapp.client import client
from datastreamer.cli.dsapp.relay import relay
from datastreamer.cli.dsapp.server import server

program = new_program(
    "Run a demo server, client or relay of a stream; for operators, see datastreamer.", {}
)


@program.command("help")
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
