"""The classes of commands and programs, which typer makes."""

from __future__ import annotations

import os
import re
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

from datastreamer.cli.commands.conversion import use_plain_conversions

SOURCES = ("source", "sources", "b", "upstreams", "target")
"""The names of the parameters that --context replaces, and of those that are arguments
DATASTREAMER_SERVER: `b` is the last argument, `upstreams` an option. A `target` is written to: only
--context replaces it."""


# The usage says what is required, and the help of an argument what it is.
_TYPE = re.compile(r" <(str|int)>$")


# A help of more parameters has its options in groups, by their parameters' names.
_MANY = 35
_GROUPS = {
    "Upstreams": re.compile("upstreams|server_.*|on_rewrite|ready_lag|context"),
    "Stream": re.compile("create|system_id|stream_version|stream_type|follow"),
    "Network": re.compile("port|host|unix|workers"),
    "TLS and secrets": re.compile("tls_.*|client_token_file|publish_.*|allow_readable_secrets"),
    "Durability": re.compile("sync|index"),
    "Integrity": re.compile("scrub_rate|heal"),
    "Archive": re.compile("archive.*|local_retention"),
    "Limits": re.compile("max_.*|reserved_.*|.*_rate|.*_timeout|grace"),
    "HTTP": re.compile("http_.*|explorer"),
    "Metrics": re.compile("metrics_.*"),
    "Logging": re.compile("log_.*"),
}


class VerbCommand(TyperCommand):
    """A command. Its SOURCE may come from a context or the environment."""

    def get_params(self, ctx: Any) -> list[Any]:
        parameters = super().get_params(ctx)
        use_plain_conversions(parameters)
        return parameters

    def format_options(self, ctx: Any, formatter: Any) -> None:
        parameters = self.get_params(ctx)
        many = len(parameters) > _MANY
        sections: dict[str, list[tuple[str, str]]] = {"Arguments": [], "Options": []}
        sections |= {title: [] for title in _GROUPS if many}
        for each in parameters:
            if row := each.get_help_record(ctx):
                title = "Arguments" if each.param_type_name == "argument" else "Options"
                if many and title == "Options":
                    found = (one for one, names in _GROUPS.items() if names.fullmatch(each.name))
                    title = next(found, title)
                sections[title].append((_TYPE.sub("", row[0]), row[1].replace("  [required]", "")))
        for title, rows in sections.items():
            if rows:
                with formatter.section(title):
                    formatter.write_dl(rows)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        source = next((each for each in self.params if each.name in SOURCES), None)
        if source is not None:
            try:
                args = self._with_source(ctx, args, source)
            except typer.BadParameter as error:
                error.ctx = ctx
                raise
        return super().parse_args(ctx, args)

    def _with_source(self, ctx: Any, args: list[str], source: Any) -> list[str]:
        """The words of the command line, with the source if none is given."""
        given: dict[str, Any] = self.make_parser(ctx).parse_args(args=list(args))[0]
        is_option = source.param_type_name == "option"
        arguments = [source] if is_option else self._arguments()
        values = [given.get(each.name) for each in arguments]
        complete = all(isinstance(each, str | list | tuple) and each for each in values)
        name, server = given.get("context"), os.environ.get("DATASTREAMER_SERVER")
        writes = source.name == "target"
        if not (isinstance(name, str) or server or complete or is_option or writes):
            from datastreamer.cli.commands.contexts import current_context

            name = current_context()
        if isinstance(name, str):
            if complete:
                what = source.opts[0] if is_option else source.metavar
                raise typer.BadParameter(f"--context {name} names the server; leave {what} out")
            server = self._use_context(ctx, name)
            if is_option:
                ctx.default_map[source.name] = [server]
            if writes and "://" not in server and not server.startswith("unix:"):
                server = f"tcp://{server}"
        elif writes:
            return args
        if is_option or complete or not server:
            return args
        return [server, *args] if source is arguments[0] else [*args, server]

    def _arguments(self) -> list[Any]:
        return [each for each in self.params if each.param_type_name == "argument"]

    def _use_context(self, ctx: Any, name: str) -> str:
        """The server of a context, whose options become defaults of the command's."""
        from datastreamer.cli.commands.contexts import context_of

        known = {each.name for each in self.params}
        options = {key.replace("-", "_"): value for key, value in context_of(name).items()}
        server = str(options.pop("server"))
        ctx.default_map = {}
        for key, value in options.items():
            # A relay has options of TLS for both of its sides.
            for_servers = f"server_{key}".replace("tls_server_name", "tls_name")
            if found := known & {for_servers} or known & {key}:
                ctx.default_map[found.pop()] = value
        return server


class ProgramGroup(TyperGroup):
    """A program, with its commands."""

    def get_params(self, ctx: Any) -> list[Any]:
        parameters = super().get_params(ctx)
        use_plain_conversions(parameters)
        return parameters
