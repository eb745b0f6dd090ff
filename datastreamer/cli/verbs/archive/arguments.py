"""What the commands of an archive share."""

from __future__ import annotations

from typing import Annotated

import typer

from datastreamer.cli.shared.options import number_option, text_option

UrlArgument = Annotated[
    str,
    typer.Argument(
        metavar="URL",
        help="The archive: s3://BUCKET/PATH, gs://..., az://..., or file:///FOLDER.",
    ),
]


def days_text(text: str) -> float:
    """The seconds of an age such as 7d or 12h."""
    units = {"d": 86400.0, "h": 3600.0, "m": 60.0, "s": 1.0}
    number, unit = text[:-1], units.get(text[-1:])
    if unit is None or not number.isascii() or not number.isdigit() or len(number) > 6:
        raise typer.BadParameter(f"it is an age, such as 7d or 12h, not {text!r}")
    return int(number) * unit


GenerationOption = Annotated[
    int | None,
    number_option("G", "Restore the end of this generation; `archive list` shows them."),
]
KeepOption = Annotated[str, text_option("AGE", "Keep the manifests of this time [7d].")]
