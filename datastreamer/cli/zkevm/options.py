"""Options that the verbs of `zkevm` share."""

from __future__ import annotations

from typing import Annotated

from datastreamer.cli.options import number_option

StreamVersionOption = Annotated[
    int | None,
    number_option(
        "--stream-version",
        "N",
        "Take entries for those of this version [the header's]: 1 fixed layouts, from 2 on "
        "protobuf.",
        most=255,
        least=1,
    ),
]
