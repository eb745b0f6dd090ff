"""Arguments and options that several commands share, with their parsers.

Wrong usage raises `typer.BadParameter`, here and in the commands.
"""

from __future__ import annotations

import math
import re
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from datastreamer.errors import BadArgument, BadBookmark, UnknownEntry
from datastreamer.format import U32_MAX, U64_MAX, Header
from datastreamer.selection.times import moment_ms
from datastreamer.zkevm.bookmark_keys import key_of, parse_key

if TYPE_CHECKING:
    import ssl

    from datastreamer.client.upstream import Upstream
    from datastreamer.transport.address import Address


Format = Literal["table", "jsonl", "hex", "raw"]
ReportFormat = Literal["table", "jsonl"]


def text_option(metavar: str, help: str, *, name: str | None = None, **more: Any) -> Any:
    """The option for a text; without `name`, that of its parameter."""
    names = [] if name is None else [name]
    return typer.Option(*names, metavar=metavar, help=help, **more)


# Numbers.

_UNITS = {"B": 1, "kB": 1e3, "MB": 1e6, "GB": 1e9, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}


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


def number_parser(most: int = U64_MAX, *, least: int = 0) -> Callable[[str | int], int]:
    """The parser of an option; typer also passes defaults through it."""

    def read(value: str | int) -> int:
        return read_number(str(value), most, least=least)

    return read


def number_option(
    metavar: str, help: str, *, least: int = 0, most: int = U64_MAX, name: str | None = None
) -> Any:
    """The option for a number from `least` to `most`."""
    return text_option(metavar, help, name=name, parser=number_parser(most, least=least))


def fraction_option(
    metavar: str, help: str, *, least: float, most: float, unit: str = "seconds"
) -> Any:
    """The option for a number of `unit` from `least` to `most`, which may have a fraction."""

    def parse(value: str | float) -> float:
        try:
            number = float(value)
        except ValueError:
            number = math.nan
        if not least <= number <= most:
            raise typer.BadParameter(
                f"it is a number of {unit} from {least:g} to {most:g}, not {_shown(str(value))}"
            )
        return number

    return text_option(metavar, help, parser=parse)


def rate_option(help: str, *, name: str | None = None) -> Any:
    """The option for a rate such as 50MB/s, in bytes per second."""

    def parse(value: str) -> float:
        found = re.fullmatch(r"([0-9]{1,9}(?:\.[0-9]{1,9})?) ?([kMG]?B|[KMG]iB)/s", value)
        rate = 0.0 if found is None else float(found[1]) * _UNITS[found[2]]
        if not rate:
            raise typer.BadParameter(
                f"it is a rate above 0, such as 50MB/s or 10MiB/s, not {_shown(value)}"
            )
        return rate

    return text_option("RATE", help, name=name, parser=parse)


def size_option(help: str) -> Any:
    """The option for a number of bytes, such as 1GB."""
    return text_option("SIZE", help, parser=read_size)


def read_size(value: str) -> int:
    found = re.fullmatch(r"([0-9]{1,9}(?:\.[0-9]{1,9})?) ?([kMG]?B|[KMG]iB)", value)
    if found is None:
        raise typer.BadParameter(f"it is a size, such as 1GB or 500MiB, not {_shown(value)}")
    return int(float(found[1]) * _UNITS[found[2]])


def read_type(text: str) -> int:
    """Parse an entry type, decimal or 0x... in hex."""
    if re.fullmatch("0[xX]0*[0-9a-fA-F]{1,16}", text):
        text = str(int(text, 16))
    return read_number(text, U32_MAX, "an entry type")


# Times.

_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86_400}


def read_moment(text: str | int) -> int:
    """Parse a time, or how long ago it was."""
    ago = re.fullmatch("([0-9]{1,9})([smhd])", str(text))
    try:
        if ago is None:
            return moment_ms(text)
        return max(0, int(1000 * (time.time() - int(ago[1]) * _SECONDS[ago[2]])))
    except BadArgument as error:
        raise typer.BadParameter(f"{error}; or 90s, 10m, 2h or 1d ago") from None


# Input.

SourceArgument = Annotated[
    str,
    typer.Argument(
        metavar="SOURCE",
        help="Stream file, or server: HOST:PORT, tcps://HOST:PORT with TLS, unix:PATH; or several "
        "servers of one stream, separated by commas: one is used while the others fail; or an "
        "archive: archive:URL. Without one: the server of DATASTREAMER_SERVER.",
    ),
]
StreamArgument = Annotated[
    str,
    typer.Argument(
        metavar="SOURCE",
        help="Stream file, or server: HOST:PORT, tcps://HOST:PORT with TLS, unix:PATH; or several "
        "servers of one stream, separated by commas: if one fails, the next is asked; "
        "or an archive: archive:URL. Without one: the server of DATASTREAMER_SERVER.",
    ),
]
FileArgument = Annotated[str, typer.Argument(metavar="FILE", help="Stream file.")]
StreamTypeOption = Annotated[
    int | None,
    number_option(
        "T", "Set the stream type to ask a server for [1], or to require of a file [any]."
    ),
]


SyncOption = Annotated[
    Literal["commit", "os"],
    typer.Option(help="Sync to disk with each commit, or leave that to the operating system."),
]
FromOption = Annotated[
    str | None,
    text_option("N|latest", "First entry [0]; latest: only later commits.", name="--from"),
]
FromTimeOption = Annotated[
    int | None,
    text_option(
        "TIME",
        "Begin at the first entry committed at or after this time: 2026-11-29T07:00:00Z, "
        "2026-11-29 (UTC), Unix milliseconds, or 10m (s, h, d) ago.",
        parser=read_moment,
    ),
]
FollowOption = Annotated[
    bool, typer.Option("--follow", help="Continue with later commits, until Ctrl-C.")
]


@dataclass(frozen=True)
class TLSOptions:
    """The options of TLS on the client's side, a group."""

    tls_ca: Annotated[
        str | None,
        text_option("FILE", "With tcps://: trust the CAs in this PEM file [the system's]."),
    ] = None
    tls_cert: Annotated[
        str | None,
        text_option("FILE", "With tcps://: present the client certificate in this PEM file."),
    ] = None
    tls_key: Annotated[
        str | None,
        text_option("FILE", "Read the key of --tls-cert from this PEM file [the same file]."),
    ] = None
    tls_server_name: Annotated[
        str | None,
        text_option("NAME", "With tcps://: require this name in the server's certificate [HOST]."),
    ] = None

    def context(self) -> ssl.SSLContext:
        """Raises `BadCertificate`."""
        from datastreamer.transport.tls import client_tls

        if self.tls_key is not None and self.tls_cert is None:
            raise typer.BadParameter("--tls-key requires --tls-cert")
        return client_tls(self.tls_ca, self.tls_cert, self.tls_key)

    def upstreams(self, addresses: Sequence[Address], source: str) -> list[Upstream]:
        """The servers at `addresses`, with TLS where they have it. Raises `typer.BadParameter` if
        an option is given and none has: `source` names them."""
        from datastreamer.client.upstream import Upstream

        secured = any(address.tls for address in addresses)
        context = self.context() if secured else False
        if not secured:
            self.check_unused(source)
        return [
            Upstream(host, port, context, self.tls_server_name) if tls else Upstream(host, port)
            for host, port, tls in addresses
        ]

    def check_unused(self, source: str) -> None:
        """Raises `typer.BadParameter` if an option is given: `source` does not use TLS."""
        for field in fields(TLSOptions):
            if getattr(self, field.name) is not None:
                option = f"--{field.name.replace('_', '-')}"
                raise typer.BadParameter(f"{option} is for tcps://HOST:PORT, not for {source}")


@dataclass(frozen=True)
class SourceOptions(TLSOptions):
    """The options of a command that reads SOURCE, a group."""

    stream_type: StreamTypeOption = None


NO_OPTIONS = SourceOptions()


# Output.

StreamVersionOption = Annotated[
    int | None,
    number_option(
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
            help="Set the output format [table on a terminal, else jsonl]; raw: the bytes "
            "as they are stored."
        ),
    ] = None
    json: Annotated[bool, typer.Option("--json", help="Same as --format jsonl.")] = False

    def chosen(self) -> Format:
        """The format that --format and --json select, or the default for standard output."""
        if self.json and self.format not in (None, "jsonl"):
            raise typer.BadParameter(f"--json and --format {self.format} exclude each other")
        if self.json or self.format is not None:
            return self.format or "jsonl"
        return "table" if sys.stdout.isatty() else "jsonl"


@dataclass(frozen=True)
class ReportOutput(EntryOutput):
    """The format of other output, a group."""

    format: Annotated[
        ReportFormat | None,
        typer.Option(help="Set the output format [table on a terminal, else jsonl]."),
    ] = None


class Key:
    """The key of a bookmark as the user wrote it; its bytes may depend on the stream version."""

    def __init__(self, text: str) -> None:
        try:
            self._key = parse_key(text)
        except BadBookmark as error:
            raise typer.BadParameter(str(error)) from None

    @property
    def needs_version(self) -> bool:
        """Whether its bytes depend on the stream version."""
        return not isinstance(self._key, bytes)

    def of(self, version: int) -> bytes:
        """Its bytes in a stream of this version."""
        if isinstance(self._key, bytes):
            return self._key
        try:
            return key_of(version, self._key)
        except BadBookmark as error:
            raise typer.BadParameter(str(error)) from None


def check_start(start: int, header: Header) -> None:
    """Raises `UnknownEntry` if `start` is past the head."""
    if start > header.total_entries:
        raise UnknownEntry(start, header.total_entries)
