"""`--config FILE`: options of a command from a TOML file, under their own names.

Options on the command line win.
"""

from __future__ import annotations

import tomllib
from typing import Annotated, Any

import typer

from datastreamer.cli.commands.contexts import did_you_mean
from datastreamer.cli.shared.exit_codes import Failure
from datastreamer.cli.shared.options import text_option


def _read_config(context: typer.Context, path: str | None) -> str | None:
    if path is None or context.resilient_parsing:
        return path
    try:
        with open(path, "rb") as file:
            found = tomllib.load(file)
    except OSError as error:
        raise Failure(f"{path}: cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise typer.BadParameter(f"{path}: not TOML: {error}") from None
    options: dict[str, Any] = {
        name[2:]: option
        for option in context.command.params
        for name in option.opts
        if name.startswith("--") and name not in ("--config", "--check-config")
    }
    # An argument has its name in lower case.
    options |= {each.name: each for each in context.command.params if each.opts[0][:1] != "-"}
    defaults = {}
    for name, value in found.items():
        option = options.get(name)
        if option is None:
            names = [each for each in options if each != "help"]
            hint = did_you_mean(name, names) or f"; the options are {', '.join(names)}"
            raise typer.BadParameter(f"{path}: unknown option {name!r}{hint}")
        many = getattr(option, "multiple", False)
        items = value if many and isinstance(value, list) else [value]
        for item in items:
            if isinstance(item, bool) != bool(getattr(option, "is_flag", False)) or not isinstance(
                item, str | int
            ):
                raise typer.BadParameter(f"{path}: {name} cannot be {item!r}")
        defaults[option.name] = items if many else value
    context.default_map = {**defaults, **(context.default_map or {})}
    return path


ConfigOption = Annotated[
    str | None,
    text_option(
        "TOML",
        "Read options from this TOML file, under their names without the leading dashes.",
        is_eager=True,
        callback=_read_config,
    ),
]
CheckConfigOption = Annotated[
    bool,
    typer.Option(
        "--check-config",
        help="Check the options and the files that they name, and exit.",
    ),
]
