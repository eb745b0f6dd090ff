"""The values of options and arguments, without pydantic.

Typer converts all values with pydantic, whose import takes a third of the start of a command. The
commands here have texts, flags, choices, and types with a parser; their conversions are put in the
place that typer keeps for its own. Values of other types are left to typer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Literal, get_args, get_origin

import typer


def use_plain_conversions(parameters: Iterable[Any]) -> None:
    """Put conversions into the parameters of a command; with a typer that has another place for
    them, nothing changes."""
    for parameter in parameters:
        descriptor = getattr(parameter, "type_descriptor", None)
        if descriptor is None or not hasattr(parameter, "_runtime_param"):
            continue
        convert = _conversion(descriptor.annotation, descriptor.parameter_info.parser)
        if convert is not None:
            parameter._runtime_param = _Conversion(convert)


class _Conversion:
    """What typer calls with the value of a parameter."""

    def __init__(self, convert: Callable[[Any], Any]) -> None:
        self._convert = convert

    def coerce(self, value: Any, param: Any, ctx: Any) -> Any:
        several = param.multiple or param.nargs == -1
        if value is None:
            return () if several else None
        return [self._convert(each) for each in value] if several else self._convert(value)


def _conversion(
    annotation: Any, parser: Callable[[Any], Any] | None
) -> Callable[[Any], Any] | None:
    if get_origin(annotation) is list:
        (annotation,) = get_args(annotation)
    if parser is not None:
        return parser
    if annotation in (str, bool):
        return lambda value: value
    if get_origin(annotation) is Literal:
        return lambda value: _chosen(value, get_args(annotation))
    return None


def _chosen(value: Any, choices: tuple[str, ...]) -> Any:
    if value not in choices:
        raise typer.BadParameter(f"{value!r} is not one of {', '.join(map(repr, choices))}.")
    return value
