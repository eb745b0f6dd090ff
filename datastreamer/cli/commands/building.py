"""Commands and programs as typer expects them.

A group is a dataclass whose fields are options: a command with a parameter of that type has the
options of the group in its place. The options of the log, and others that their callbacks
execute, are added here.
"""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable, Mapping
from copy import copy
from dataclasses import fields, is_dataclass
from inspect import Parameter
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import typer
from typer.core import TyperGroup

from datastreamer.cli.commands.classes import SOURCES, ProgramGroup
from datastreamer.cli.shared import logs
from datastreamer.service.log import Style
from datastreamer.transport.secret_files import ALLOW as ALLOW_READABLE_SECRETS
from datastreamer.transport.secret_files import readable_again


def _set_level(level: logs.Level | None) -> None:
    if level is not None:
        logs.set_level(level)


def _set_style(style: Style | None) -> None:
    if style is not None:
        logs.set_style(style)


def _allow_readable_secrets(wanted: bool) -> None:
    if wanted:
        os.environ[ALLOW_READABLE_SECRETS] = "1"


LOG_OPTIONS = {
    "log_level": Annotated[
        logs.Level | None,
        typer.Option(callback=_set_level, help="Set the lowest level to log [info]."),
    ],
    "log_format": Annotated[
        Style | None, typer.Option(callback=_set_style, help="Set the format of the log [text].")
    ],
}
_SECRET_OPTIONS = {
    "allow_readable_secrets": Annotated[
        bool | None,
        typer.Option(
            "--allow-readable-secrets",
            callback=_allow_readable_secrets,
            help="Accept files of tokens and private keys that other users own or can read, "
            "such as mounted secrets of a container.",
        ),
    ]
}
_CONTEXT_OPTION = {
    "context": Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Read SOURCE and its TLS options from this context, see `datastreamer context`.",
        ),
    ]
}
# Parameters that name a file with a secret, of any command; and all that may be given by a pipe.
_SECRETS = {"tls_key", "server_tls_key", "token_file", "publish_token_file", "http_token_file"}
_READ_AGAIN = _SECRETS | {"client_token_file", "server_token_file", "tls_client_ca"}
_READ_AGAIN |= {f"{side}tls_{what}" for side in ("", "server_") for what in ("ca", "cert")}


def new_program(
    about: str,
    options: Mapping[str, Any] = LOG_OPTIONS,
    group: type[TyperGroup] | None = None,
) -> typer.Typer:
    """A program with the commands of `group`, or without commands yet; called without a command, it
    shows its help."""
    program = typer.Typer(
        cls=group or ProgramGroup,
        add_completion=False,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
        context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    )

    def show_help(context: typer.Context) -> None:
        if context.invoked_subcommand is None:
            typer.echo(context.get_help())

    program.callback(help=about, invoke_without_command=True)(expand(show_help, options))
    return program


def verb(command: Callable[..., None]) -> Callable[..., None]:
    """`command` with its groups expanded, the options of the log, and, if it reads secrets from
    files, the option about their permissions."""
    names = inspect.signature(expand(command)).parameters.keys()
    added = {
        **(_CONTEXT_OPTION if names & {*SOURCES} else {}),
        **(_SECRET_OPTIONS if names & _SECRETS else {}),
        **LOG_OPTIONS,
    }
    return expand(command, added)


def _default_said(option: Any, default: Any) -> Any:
    """The option with its default at the end of its help, in brackets, as helps write defaults
    that depend on something."""
    hint, *infos = get_args(option) if get_origin(option) is Annotated else (option,)
    if not infos or default is None or isinstance(default, bool) or default is Parameter.empty:
        return option
    info = copy(infos[0])
    shown = f"{default:g}" if isinstance(default, float) else default
    info.help = f"{str(info.help).removesuffix('.')} [{shown}]."
    info.show_default = False
    return Annotated[hint, info]


def expand(
    command: Callable[..., None], added: Mapping[str, Any] | None = None
) -> Callable[..., None]:
    """`command` with the options of each group in place of the group, and then the options
    `added`, which are not passed to it."""
    hints = get_type_hints(command, include_extras=True)
    groups: dict[str, Any] = {name: hint for name, hint in hints.items() if is_dataclass(hint)}
    found: dict[str, tuple[Any, Any]] = {}
    for parameter in inspect.signature(command).parameters.values():
        if parameter.name in groups:
            group = groups[parameter.name]
            options = get_type_hints(group, include_extras=True)
            found |= {field.name: (options[field.name], field.default) for field in fields(group)}
        else:
            found[parameter.name] = hints[parameter.name], parameter.default
    found |= {name: (option, None) for name, option in (added or {}).items()}
    found = {name: (_default_said(*it), it[1]) for name, it in found.items()}

    def run(**values: Any) -> None:
        for name in added or ():
            del values[name]
        for name in _READ_AGAIN & values.keys():
            value = values[name]
            values[name] = [*map(readable_again, value)] if isinstance(value, list) else value
            if isinstance(value, str):
                values[name] = readable_again(value)
        for name, group in groups.items():
            values[name] = group(**{field.name: values.pop(field.name) for field in fields(group)})
        command(**values)

    functools.update_wrapper(run, command)
    # Lines of examples are not wrapped.
    run.__doc__ = (command.__doc__ or "").replace("    Examples:\n", "    \b\n    Examples:\n")
    run.__signature__ = inspect.Signature(  # type: ignore[attr-defined]  # `inspect` reads it
        [
            Parameter(name, Parameter.KEYWORD_ONLY, default=default, annotation=option)
            for name, (option, default) in found.items()
        ]
    )
    run.__annotations__ = {name: option for name, (option, _) in found.items()}
    return run
