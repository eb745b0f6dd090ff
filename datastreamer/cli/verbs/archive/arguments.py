"""What the commands of an archive share, and those that archive what they write."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from datastreamer.archive.options import INTERVAL, ArchiveOptions
from datastreamer.cli.shared.options import (
    fraction_option,
    number_option,
    read_size,
    size_option,
    text_option,
)
from datastreamer.errors import BadArgument
from datastreamer.storage.objects import LEVEL, TIMEOUT

if TYPE_CHECKING:
    from datastreamer.cli.shared.server_options import ServerOptions
    from datastreamer.server.limits import Limits

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


def read_retention(text: str) -> int | timedelta:
    """What is kept in the file: bytes, or a time."""
    with contextlib.suppress(typer.BadParameter):
        return timedelta(seconds=days_text(text))
    with contextlib.suppress(typer.BadParameter):
        return read_size(text)
    raise typer.BadParameter(f"it is a size or an age, such as 20GB or 7d, not {text!r}")


GenerationOption = Annotated[
    int | None,
    number_option("G", "Restore the end of this generation; `archive list` shows them."),
]
KeepOption = Annotated[str, text_option("AGE", "Keep manifests that are younger than this.")]


@dataclass(frozen=True)
class ArchiveGroup:
    """Where the stream is archived, a group."""

    archive: Annotated[
        str | None,
        text_option(
            "URL", "Archive the stream there: s3://BUCKET/PATH, gs://, az:// or file:///FOLDER."
        ),
    ] = None
    archive_interval: Annotated[
        float,
        fraction_option(
            "SECONDS",
            "Interval between updates of the archive.",
            least=1,
            most=86400,
        ),
    ] = INTERVAL
    archive_segment: Annotated[
        int | None,
        size_option("Size of the archive's objects before compression, 16MiB to 256MiB [64MiB]."),
    ] = None
    archive_level: Annotated[
        int, number_option("N", "Compression level of zstd, 1 to 9.", least=1, most=9)
    ] = LEVEL
    archive_timeout: Annotated[
        float,
        fraction_option(
            "SECONDS",
            "Timeout of a request to the store, retries included.",
            least=1,
            most=3600,
        ),
    ] = TIMEOUT
    local_retention: Annotated[
        Any,
        text_option(
            "SIZE|AGE",
            "Keep this part of the stream in the file, such as 20GB or 7d; the archive alone has "
            "older entries.",
            parser=read_retention,
        ),
    ] = None
    archive_takeover: Annotated[
        bool,
        typer.Option(
            "--archive-takeover",
            help="Archive even if the archive is of another file or has other entries.",
        ),
    ] = False

    archive_ready_lag: Annotated[
        float | None,
        fraction_option(
            "SECONDS",
            "Report not ready when the archive has lagged, or not answered, for this time.",
            least=1,
            most=86400 * 7,
        ),
    ] = None

    def limits(self, options: ServerOptions) -> Limits:
        """Those of a server that reads evicted pages."""
        return replace(options.limits(), archive_timeout=self.archive_timeout)

    def options(self, mode: Literal["push", "read", "follow"] = "push") -> ArchiveOptions | None:
        """Raises `typer.BadParameter`."""
        if self.archive is None:
            if self.archive_takeover or self.archive_segment or self.local_retention is not None:
                raise typer.BadParameter("the options of an archive need --archive URL")
            return None
        given = {} if self.archive_segment is None else {"segment": self.archive_segment}
        try:
            return ArchiveOptions(
                self.archive,
                mode=mode,
                interval=self.archive_interval,
                level=self.archive_level,
                takeover=self.archive_takeover,
                timeout=self.archive_timeout,
                local_retention=self.local_retention,
                ready_lag=self.archive_ready_lag or 0.0,
                **given,
            )
        except BadArgument as error:
            raise typer.BadParameter(str(error)) from None
