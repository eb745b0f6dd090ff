"""Arguments and options that several commands share, with their parsers.

Wrong usage raises `typer.BadParameter`, here and in the commands.
"""

from __future__ import annotations

import math
import os
import re
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from enum import Enum
from typing import TYPE_CHECKING, Annotated, Any

import typer

from datastreamer.cli.shared import logs
from datastreamer.errors import BadBookmark
from datastreamer.format import MAX_BOOKMARK_SIZE, U32_MAX, U64_MAX
from datastreamer.transport.secret_files import ALLOW as ALLOW_READABLE_SECRETS
from datastreamer.zkevm.bookmark_keys import BookmarkName, key_of

if TYPE_CHECKING:
    import ssl


class LogLevel(str, Enum):
    """The lowest level that is logged."""

    debug = "debug"
    info = "info"
    warn = "warn"
    error = "error"


class LogFormat(str, Enum):
    """The format of the log."""

    text = "text"
    json = "json"


class Format(str, Enum):
    """The format of data on standard output."""

    table = "table"
    jsonl = "jsonl"
    hex = "hex"
    raw = "raw"


class ReportFormat(str, Enum):
    """The same, for output other than entries."""

    table = "table"
    jsonl = "jsonl"


def new_program() -> typer.Typer:
    """An empty program with the settings that all programs share."""
    return typer.Typer(
        add_completion=False,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
        context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    )


# Numbers.


def read_number(text: str, most: int, what: str = "it", *, least: int = 0) -> int:
    """Parse a decimal number from `least` to `most`."""
    # Python does not convert numbers of several thousand digits.
    digits = text.lstrip("0") or text[-1:]
    fine = digits.isascii() and digits.isdigit() and len(digits) <= len(str(most))
    if not (fine and least <= int(digits) <= most):
        raise typer.BadParameter(f"{what} is a number from {least} to {most}, not {_shown(text)}")
    return int(digits)


def _shown(text: str) -> str:
    return repr(text if len(text) <= 60 else f"{text[:57]}...")


def number_parser(most: int, *, least: int = 0) -> Callable[[str | int], int]:
    """The parser of an option; typer also passes defaults through it."""

    def read(value: str | int) -> int:
        return read_number(str(value), most, least=least)

    return read


def number_option(
    name: str, metavar: str, help: str, *, least: int = 0, most: int = U64_MAX
) -> Any:
    """The option for a number from `least` to `most`."""
    return typer.Option(name, parser=number_parser(most, least=least), metavar=metavar, help=help)


def seconds_parser(least: float, most: float) -> Callable[[str | float], float]:
    """The parser of seconds from `least` to `most`."""

    def parse(value: str | float) -> float:
        try:
            seconds = float(value)
        except ValueError:
            seconds = math.nan
        if not least <= seconds <= most:
            shown = _shown(str(value))
            raise typer.BadParameter(
                f"it is a number of seconds from {least:g} to {most:g}, not {shown}"
            )
        return seconds

    return parse


def read_type(text: str) -> int:
    """Parse an entry type, decimal or 0x... in hex."""
    if re.fullmatch("0[xX]0*[0-9a-fA-F]{1,16}", text):
        text = str(int(text, 16))
    return read_number(text, U32_MAX, "an entry type")


# The log.


def _set_log_level(level: LogLevel | None) -> LogLevel | None:
    if level is not None:
        logs.set_level(level.value)
    return level


def _set_log_format(style: LogFormat | None) -> LogFormat | None:
    if style is not None:
        logs.set_style(style.value)
    return style


LogLevelOption = Annotated[
    LogLevel | None,
    typer.Option(
        "--log-level", callback=_set_log_level, help="Set the lowest level to log [info]."
    ),
]
LogFormatOption = Annotated[
    LogFormat | None,
    typer.Option(
        "--log-format", callback=_set_log_format, help="Set the format of the log [text]."
    ),
]


def _show_version(wanted: bool) -> bool:
    if wanted:
        from datastreamer._version import __version__

        typer.echo(f"datastreamer {__version__}")
        raise typer.Exit
    return wanted


VersionOption = Annotated[
    bool,
    typer.Option(
        "--version", callback=_show_version, is_eager=True, help="Show the version and exit."
    ),
]

# Input.

SourceArgument = Annotated[
    str,
    typer.Argument(
        metavar="SOURCE",
        help="Stream file, or server: HOST:PORT, tcps://HOST:PORT with TLS, unix:PATH.",
    ),
]
FileArgument = Annotated[str, typer.Argument(metavar="FILE", help="Stream file.")]
StreamTypeOption = Annotated[
    int | None,
    number_option(
        "--stream-type",
        "T",
        "Set the stream type to ask a server for [1], or to require of a file [any].",
    ),
]


def _allow_readable_secrets(wanted: bool) -> None:
    if wanted:
        os.environ[ALLOW_READABLE_SECRETS] = "1"


AllowReadableSecretsOption = Annotated[
    bool,
    typer.Option(
        "--allow-readable-secrets",
        callback=_allow_readable_secrets,
        help="Accept files of tokens and private keys that other users own or can read, "
        "such as mounted secrets of a container.",
    ),
]


@dataclass(frozen=True)
class TLSOptions:
    """The options of TLS on the client's side, a group."""

    tls_ca: Annotated[
        str | None,
        typer.Option(
            "--tls-ca",
            metavar="FILE",
            help="With tcps://: trust the CAs in this PEM file [the system's].",
        ),
    ] = None
    tls_cert: Annotated[
        str | None,
        typer.Option(
            "--tls-cert",
            metavar="FILE",
            help="With tcps://: present the client certificate in this PEM file.",
        ),
    ] = None
    tls_key: Annotated[
        str | None,
        typer.Option(
            "--tls-key",
            metavar="FILE",
            help="Read the key of --tls-cert from this PEM file [the same file].",
        ),
    ] = None
    tls_server_name: Annotated[
        str | None,
        typer.Option(
            "--tls-server-name",
            metavar="NAME",
            help="With tcps://: require this name in the server's certificate [HOST].",
        ),
    ] = None

    def context(self) -> ssl.SSLContext:
        """Raises `BadCertificate`."""
        from datastreamer.transport.tls import client_tls

        if self.tls_key is not None and self.tls_cert is None:
            raise typer.BadParameter("--tls-key requires --tls-cert")
        return client_tls(self.tls_ca, self.tls_cert, self.tls_key)

    def check_unused(self, source: str) -> None:
        """Raises `typer.BadParameter` if an option is given: `source` does not use TLS."""
        for name, value in asdict(self).items():
            if value is not None:
                option = f"--{name.replace('_', '-')}"
                raise typer.BadParameter(f"{option} is for tcps://HOST:PORT, not for {source}")


NO_TLS = TLSOptions()


# Output.

StreamVersionOption = Annotated[
    int | None,
    number_option(
        "--stream-version",
        "N",
        "Decode entries as those of this stream version [the header's]: 1 fixed layouts, 2 and "
        "later protobuf.",
        most=255,
        least=1,
    ),
]


@dataclass(frozen=True)
class EntryOutput:
    """The format of entries, a group."""

    format: Annotated[
        Format | None,
        typer.Option(
            "--format",
            help="Set the output format [table on a terminal, else jsonl]; raw: the "
            "entries' bytes.",
        ),
    ] = None
    json: Annotated[bool, typer.Option("--json", help="Same as --format jsonl.")] = False

    def chosen(self) -> Format:
        """The format that --format and --json select, or the default for standard output."""
        return _chosen(self.format, self.json)


@dataclass(frozen=True)
class ReportOutput:
    """The format of other output, a group."""

    format: Annotated[
        ReportFormat | None,
        typer.Option("--format", help="Set the output format [table on a terminal, else jsonl]."),
    ] = None
    json: Annotated[bool, typer.Option("--json", help="Same as --format jsonl.")] = False

    def chosen(self) -> Format:
        """The format that --format and --json select, or the default for standard output."""
        return _chosen(self.format, self.json)


def _chosen(format: Format | ReportFormat | None, json: bool) -> Format:
    if json:
        if format not in (None, Format.jsonl):
            raise typer.BadParameter(f"--json and --format {format.value} exclude each other")
        return Format.jsonl
    if format is not None:
        return Format(format.value)
    return Format.table if sys.stdout.isatty() else Format.jsonl


ENTRY_OUTPUT = EntryOutput()
REPORT_OUTPUT = ReportOutput()

# Keys of bookmarks.

KeyArgument = Annotated[
    str,
    typer.Argument(
        metavar="KEY", help="Key of the bookmark: 0x... in hex, block:N, batch:N, or text."
    ),
]


class Key:
    """The key of a bookmark as the user wrote it; its bytes may depend on the stream version."""

    def __init__(self, text: str) -> None:
        self._mark: BookmarkName | None = None
        self._bytes = b""
        kind, colon, number = text.partition(":")
        if text[:2].lower() == "0x":
            try:
                self._bytes = bytes.fromhex(text[2:])
            except ValueError:
                raise typer.BadParameter(
                    f"{text!r} is not hex: 0x and two digits per byte"
                ) from None
        elif colon and kind in ("block", "batch"):
            value = read_number(number, U64_MAX, f"the part after {kind}:")
            self._mark = BookmarkName("block" if kind == "block" else "batch", value)
        else:
            self._bytes = os.fsencode(text)
        if self._mark is None and not 1 <= len(self._bytes) <= MAX_BOOKMARK_SIZE:
            raise typer.BadParameter(
                f"the key of a bookmark has 1 to {MAX_BOOKMARK_SIZE} bytes, {text!r} has "
                f"{len(self._bytes)}"
            )

    def of(self, version: int) -> bytes:
        """Its bytes in a stream of this version."""
        if self._mark is None:
            return self._bytes
        try:
            return key_of(version, self._mark)
        except BadBookmark as error:
            raise typer.BadParameter(str(error)) from None
