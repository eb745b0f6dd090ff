"""Options that every command has, added to the signatures of the commands."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from inspect import Parameter
from typing import Any, get_type_hints

from datastreamer.cli.shared.options import (
    AllowReadableSecretsOption,
    LogFormatOption,
    LogLevelOption,
    TLSCaOption,
    TLSCertOption,
    TLSKeyOption,
    TLSOptions,
    TLSServerNameOption,
)

_TLS = {
    "tls_ca": TLSCaOption,
    "tls_cert": TLSCertOption,
    "tls_key": TLSKeyOption,
    "tls_server_name": TLSServerNameOption,
}
# Parameters that name a file with a secret, of any command.
_SECRETS = {"tls", "tls_key", "server_tls_key", "token_file", "publish_token_file"}
_SECRET = {"allow_readable_secrets": AllowReadableSecretsOption}
# Their callbacks do the work.
_LOG = {"log_level": LogLevelOption, "log_format": LogFormatOption}


def verb(command: Callable[..., None]) -> Callable[..., None]:
    """`command` as typer expects it: with the options of the log added, a parameter `tls`
    replaced by the options that make one, and, if it reads secrets from files, with the option
    about their permissions."""
    hints = get_type_hints(command, include_extras=True)

    def parameters() -> Iterator[Parameter]:
        for parameter in inspect.signature(command).parameters.values():
            if parameter.name == "tls":
                yield from _options(_TLS)
            else:
                yield parameter.replace(annotation=hints[parameter.name])
        if not _SECRETS.isdisjoint(hints):
            yield from _options(_SECRET, False)
        yield from _options(_LOG)

    @functools.wraps(command)
    def run(**values: Any) -> None:
        for name in (*_SECRET, *_LOG):
            values.pop(name, None)
        if "tls" in hints:
            values["tls"] = TLSOptions(*(values.pop(name) for name in _TLS))
        command(**values)

    signature = inspect.Signature(list(parameters()))
    run.__signature__ = signature  # type: ignore[attr-defined]  # `inspect` reads it
    run.__annotations__ = {name: it.annotation for name, it in signature.parameters.items()}
    return run


def _options(them: dict[str, Any], default: Any = None) -> Iterator[Parameter]:
    for name, option in them.items():
        yield Parameter(name, Parameter.POSITIONAL_OR_KEYWORD, default=default, annotation=option)
