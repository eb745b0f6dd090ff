"""The classes of commands and programs, which typer makes."""

from __future__ import annotations

import os
import re
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

from datastreamer.cli.commands.conversion import use_plain_conversions

SOURCES = ("source", "sources")
"""The names of the arguments that --context and DATASTREAMER_SERVER replace."""


# The usage says what is required, and the help of an argument what it is.
_TYPE = re.compile(r" <(str|int)>$")


class VerbCommand(TyperCommand):
    """A command. Its SOURCE may come from a context or the environment."""

    def get_params(self, ctx: Any) -> list[Any]:
        parameters = super().get_params(ctx)
        use_plain_conversions(parameters)
        return parameters

    def format_options(self, ctx: Any, formatter: Any) -> None:
        for title, kind in (("Arguments", "argument"), ("Options", "option")):
            rows = [
                (_TYPE.sub("", row[0]), row[1].replace("  [required]", ""))
                for each in self.get_params(ctx)
                if each.param_type_name == kind and (row := each.get_help_record(ctx))
            ]
            if rows:
                with formatter.section(title):
                    formatter.write_dl(rows)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        arguments = [each for each in self.params if each.param_type_name == "argument"]
        if arguments and arguments[0].name in SOURCES:
            try:
                args = self._with_source(ctx, args, arguments)
            except typer.BadParameter as error:
                error.ctx = ctx
                raise
        return super().parse_args(ctx, args)

    def _with_source(self, ctx: Any, args: list[str], arguments: list[Any]) -> list[str]:
        """The words of the command line, with the source if none is given."""
        given: dict[str, Any] = self.make_parser(ctx).parse_args(args=list(args))[0]
        values = [given.get(each.name) for each in arguments]
        lacks_one = sum(isinstance(each, str) or bool(each) for each in values) < len(arguments)
        name = given.get("context")
        if isinstance(name, str):
            from datastreamer.cli.commands.contexts import context_of

            context = context_of(name)
            if not lacks_one:
                raise typer.BadParameter(f"--context {name} names the server; leave SOURCE out")
            options = {key.replace("-", "_"): value for key, value in context.items()}
            known = {each.name for each in self.params}
            ctx.default_map = {key: value for key, value in options.items() if key in known}
            return [str(context["server"]), *args]
        if lacks_one and (server := os.environ.get("DATASTREAMER_SERVER")):
            return [server, *args]
        return args


class ProgramGroup(TyperGroup):
    """A program, with its commands."""

    def get_params(self, ctx: Any) -> list[Any]:
        parameters = super().get_params(ctx)
        use_plain_conversions(parameters)
        return parameters
