"""The signatures of commands as typer expects them: groups of options, and common options.

A group is a dataclass whose fields are options. A command with a parameter of that type has
the options of the group in its place.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from inspect import Parameter
from typing import Any, get_type_hints

from datastreamer.cli.shared.options import (
    AllowReadableSecretsOption,
    LogFormatOption,
    LogLevelOption,
)

# Parameters that name a file with a secret, of any command.
_SECRETS = {"tls_key", "server_tls_key", "token_file", "publish_token_file"}
# Their callbacks do the work.
_SECRET = {"allow_readable_secrets": AllowReadableSecretsOption}
_LOG = {"log_level": LogLevelOption, "log_format": LogFormatOption}


def verb(command: Callable[..., None]) -> Callable[..., None]:
    """`command` with its groups expanded, the options of the log, and, if it reads secrets from
    files, the option about their permissions."""
    expanded = expand(command)
    parameters = list(inspect.signature(expanded).parameters.values())
    added: dict[str, Any] = dict(_LOG)
    if any(parameter.name in _SECRETS for parameter in parameters):
        parameters += _options(_SECRET, {"allow_readable_secrets": False})
        added |= _SECRET
    parameters += _options(_LOG, dict.fromkeys(_LOG))

    def run(**values: Any) -> None:
        expanded(**{name: value for name, value in values.items() if name not in added})

    return _with_signature(run, command, parameters)


def expand(command: Callable[..., None]) -> Callable[..., None]:
    """`command` with the options of each group in place of the group."""
    hints = get_type_hints(command, include_extras=True)
    groups: dict[str, Any] = {name: hint for name, hint in hints.items() if is_dataclass(hint)}
    parameters: list[Parameter] = []
    for parameter in inspect.signature(command).parameters.values():
        group = groups.get(parameter.name)
        if group is None:
            parameters.append(parameter.replace(annotation=hints[parameter.name]))
        else:
            defaults = {field.name: field.default for field in fields(group)}
            parameters += _options(get_type_hints(group, include_extras=True), defaults)

    def run(**values: Any) -> None:
        for name, group in groups.items():
            values[name] = group(**{field.name: values.pop(field.name) for field in fields(group)})
        command(**values)

    return _with_signature(run, command, parameters)


def _with_signature(
    run: Callable[..., None], command: Callable[..., None], parameters: list[Parameter]
) -> Callable[..., None]:
    functools.update_wrapper(run, command)
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]  # `inspect` reads it
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return run


def _options(options: Mapping[str, Any], defaults: Mapping[str, Any]) -> Iterator[Parameter]:
    for name, option in options.items():
        kind, default = Parameter.POSITIONAL_OR_KEYWORD, defaults[name]
        yield Parameter(name, kind, default=default, annotation=option)
