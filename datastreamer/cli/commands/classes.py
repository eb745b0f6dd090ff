"""The classes of commands and programs, which typer makes."""

from __future__ import annotations

from typing import Any

from typer.core import TyperCommand, TyperGroup

from datastreamer.cli.commands.conversion import use_plain_conversions


class VerbCommand(TyperCommand):
    """A command."""

    def get_params(self, ctx: Any) -> list[Any]:
        parameters = super().get_params(ctx)
        use_plain_conversions(parameters)
        return parameters


class ProgramGroup(TyperGroup):
    """A program, with its commands."""

    def get_params(self, ctx: Any) -> list[Any]:
        parameters = super().get_params(ctx)
        use_plain_conversions(parameters)
        return parameters
