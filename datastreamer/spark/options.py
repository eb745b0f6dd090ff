"""The options of `spark.read`, `spark.readStream` and `df.write`, parsed and checked.

Owns the names of all options and their syntax. Must not know files, servers or Spark.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal, NamedTuple, TypeAlias, cast, get_args

from datastreamer.arrow.record_batches import OnError
from datastreamer.arrow.tables import ENTRIES, NAMES
from datastreamer.errors import BadArgument, UsageError
from datastreamer.format import STREAM_TYPE_SEQUENCER, U32_MAX, U64_MAX, Header
from datastreamer.protocol.retry import MOST_SECONDS
from datastreamer.selection.clauses import Selection, with_prefixes
from datastreamer.selection.times import moment_ms
from datastreamer.transport.address import Address, parse_address
from datastreamer.zkevm.bookmark_keys import BookmarkName, Kind

Mode: TypeAlias = Literal["FAILFAST", "PERMISSIVE", "DROPMALFORMED"]
Implementation: TypeAlias = Literal["auto", "native", "python"]
ON_ERROR: Final[dict[Mode, OnError]] = {
    "FAILFAST": "raise",
    "PERMISSIVE": "null",
    "DROPMALFORMED": "drop",
}

PARTITION_BYTES: Final = 128 << 20
BATCH_PART_BYTES: Final = 32 << 20
"""For a micro-batch: smaller parts, so that a small batch still uses all cores."""
RETRY_SECONDS: Final = 30.0

# If one of these is empty, the error says how to name the stream.
_LOCATIONS: Final = ("path", "paths", "file", "server")
_UNITS: Final = {"": 1, "b": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30}
_SIZE: Final = re.compile(r"(\d{1,20})\s*([bkmg]?)b?", re.IGNORECASE)
_BOOKMARK: Final = re.compile(r"(block|batch):(\d+)")

# Prefixes of options that Spark itself passes to every source or sink.
_OF_SPARK: Final = ("spark.", "serialization.", "__", "checkpointlocation", "queryname")
# Prefixes of what Spark passes for a table of a catalog.
_OF_CATALOG: Final = ("option.", "provider")

_NO_LOCATION: Final = (
    "say where the stream is: the option path (a file, a folder, a glob) or the option server "
    "(HOST:PORT)"
)
_CATALOG_TABLE: Final = (
    ". Without the jar that datastreamer.spark.native_jar() names Spark keeps no options for a "
    "table of a catalog: use CREATE TEMPORARY VIEW name USING datastream OPTIONS (...) instead of "
    "CREATE TABLE, or add the jar"
)


class StartTime(NamedTuple):
    """The first entry that was committed at or after a time, in Unix ms."""

    ms: int


Offset: TypeAlias = int | BookmarkName | StartTime
"""The number of an entry, or the block, the batch or the time that begins there."""


@dataclass(frozen=True, slots=True)
class TLS:
    """TLS options for servers. Executors read the files on their own machines."""

    ca: str | None = None
    certificate: str | None = None
    key: str | None = None
    server_name: str | None = None


@dataclass(frozen=True, slots=True)
class Options:
    """The options of a query, made by `read_options`. Either `paths` or `servers` is set."""

    paths: tuple[str, ...] = ()
    servers: tuple[Address, ...] = ()
    table: str = ENTRIES
    mode: Mode = "FAILFAST"
    start: Offset = 0
    stop: Offset | None = None
    """Exclusive. None: the end of what is committed when the query is planned."""

    where: Selection | None = None
    """Which entries of the table `entries` are rows. None: all."""

    partition_bytes: int = PARTITION_BYTES
    system_id: bool | None = None
    """Whether rows have a `system_id` column. None: if the query may read several streams."""

    verify: bool = True
    """Whether pages of files are compared with their checksums."""

    stream_type: int = STREAM_TYPE_SEQUENCER
    version: int | None = None
    tls: TLS | None = None
    timeout: float = 10.0
    retry_for: float = RETRY_SECONDS
    """Seconds without an answer from a server before the query fails; infinity: never."""

    batch_reads: bool = True
    """Whether servers are asked for extensions of the protocol."""

    deep: bool = False
    """Whether the files in the subfolders of a folder are read, too."""

    generation: int | None = None
    """Which generation of an archive is read. None: the newest one."""

    reader: Implementation = "auto"
    """Which implementation reads files: `native` is in Java, `auto` is that one if Spark has it."""

    from_latest: bool = False
    """Begin with what is committed after the query starts. This option and those below are for
    `spark.readStream` only."""

    max_entries: int | None = None
    max_bytes: int | None = None
    fail_on_data_loss: bool = True
    changes: bool = False
    """Whether rows are changes: what was delivered is deleted when the stream no longer has it."""

    token_file: str | None = None
    """A file with the token for servers. Executors read it on their own machines."""

    staging: str | None = None
    """The folder for the rows of the tasks of ``df.write``. None: the folder of the stream."""

    transaction: tuple[str, int] | None = None
    """The application and the version of what ``df.write`` appends once. None: it is appended."""

    @property
    def on_error(self) -> OnError:
        """How the Arrow reader handles an entry that is not an event."""
        return ON_ERROR[self.mode]

    def version_of(self, header: Header) -> int:
        """The version by which entries of a stream are read."""
        return header.version if self.version is None else self.version


NAMES_OF_OPTIONS: Final = (
    *("path", "paths", "file", "server", "table", "mode", "startingOffset", "endingOffset"),
    *("startingTimestamp", "endingTimestamp", "types", "prefixes", "batchReads"),
    *("recursiveFileLookup", "partitionBytes", "systemId", "verify", "streamType", "streamVersion"),
    *("tls", "tlsCa", "tlsCert", "tlsKey", "tlsServerName", "timeout", "retryFor"),
    *("maxEntriesPerTrigger", "maxBytesPerTrigger", "failOnDataLoss", "changes"),
    *("generation", "reader", "tokenFile", "stagingPath", "txnAppId", "txnVersion"),
)


def read_options(given: Mapping[str, str], partition_bytes: int = PARTITION_BYTES) -> Options:
    """Parse the options, whose names are case-insensitive. Raises `UsageError`.

    `partition_bytes` is the default of the option partitionBytes.
    """
    if not given or any(name.lower().startswith(_OF_CATALOG) for name in given):
        raise UsageError(_NO_LOCATION + _CATALOG_TABLE)
    texts = {name.lower(): value.strip() for name, value in given.items()}
    known = {name.lower(): name for name in NAMES_OF_OPTIONS}
    for name in given:
        if name.lower() not in known and not name.lower().startswith(_OF_SPARK):
            raise UsageError(
                f"there is no option {name!r}: the options are {', '.join(NAMES_OF_OPTIONS)}"
            )
    for name, text in texts.items():
        if name in known and not text and known[name] not in _LOCATIONS:
            raise UsageError(f"option {known[name]} is empty: give it a value or leave it out")
    read = _Texts({known[name]: text for name, text in texts.items() if name in known and text})
    paths, servers = read.paths(), read.servers()
    if bool(paths) == bool(servers):
        raise UsageError(_NO_LOCATION + (", not both" if paths else ""))
    from_latest = texts.get("startingoffset", "").lower() == "latest"
    table = read.choice("table", NAMES, ENTRIES)
    reader = cast("Implementation", read.choice("reader", get_args(Implementation), "auto"))
    changes = read.flag("changes") is True
    if changes and reader == "native":
        raise UsageError(
            "option changes: the reader in Java (option reader: native) has no changes: set reader "
            "to auto or python"
        )
    return Options(
        paths=paths,
        servers=servers,
        table=table,
        mode=cast("Mode", read.choice("mode", get_args(Mode), "FAILFAST", upper=True)),
        start=read.bound("starting", "latest" if from_latest else "earliest", 0),
        stop=read.bound("ending", "latest", None),
        where=read.selection(table),
        partition_bytes=read.size("partitionBytes", partition_bytes),
        system_id=read.flag("systemId"),
        verify=read.flag("verify") is not False,
        stream_type=read.number("streamType", STREAM_TYPE_SEQUENCER, U64_MAX),
        version=read.number("streamVersion", None, 255, least=1),
        tls=read.tls(),
        timeout=read.seconds("timeout", 10.0, least=0.001),
        retry_for=read.seconds("retryFor", RETRY_SECONDS, endless="forever"),
        batch_reads=read.flag("batchReads") is not False,
        deep=read.flag("recursiveFileLookup") is True,
        generation=read.number("generation", None, U64_MAX, least=1),
        reader=reader,
        from_latest=from_latest,
        max_entries=read.count("maxEntriesPerTrigger"),
        max_bytes=read.size("maxBytesPerTrigger", None),
        fail_on_data_loss=read.flag("failOnDataLoss") is not False,
        changes=changes,
        token_file=texts.get("tokenfile"),
        staging=texts.get("stagingpath"),
        transaction=read.transaction(),
    )


class _Texts:
    """The option values as text; each method parses one."""

    def __init__(self, texts: dict[str, str]) -> None:
        self._texts = texts

    def _bad(self, name: str, wanted: str) -> UsageError:
        return UsageError(f"option {name}: {self._texts[name]!r} is not {wanted}")

    def paths(self) -> tuple[str, ...]:
        one = self._texts.get("path") or self._texts.get("file")
        if "path" in self._texts and "file" in self._texts:
            raise UsageError("the options path and file are the same: give only one")
        if "paths" not in self._texts:
            return (one,) if one else ()
        try:
            several = json.loads(self._texts["paths"])
        except ValueError:
            several = None
        paths = several if isinstance(several, list) else [None]
        if not all(isinstance(path, str) and path.strip() for path in paths):
            raise self._bad("paths", 'a list of paths in JSON, ["a.bin", "b.bin"]')
        return (*((one,) if one else ()), *paths)

    def servers(self) -> tuple[Address, ...]:
        text = self._texts.get("server", "")
        try:
            return tuple(parse_address(part.strip()) for part in text.split(",") if part.strip())
        except UsageError as error:
            raise UsageError(f"option server: {error}; separate several by commas") from None

    def choice(
        self, name: str, choices: tuple[str, ...], default: str, *, upper: bool = False
    ) -> str:
        text = self._texts.get(name, default)
        text = text.upper() if upper else text.lower()
        if text not in choices:
            raise self._bad(name, f"one of {', '.join(choices)}")
        return text

    def offset(self, name: str, word: str, default: int | None) -> Offset:
        text = self._texts.get(name, word).lower()
        found = _BOOKMARK.fullmatch(text)
        if text == word:
            return cast("int", default)
        if found is not None and _is_number(found[2], U64_MAX):
            return BookmarkName(cast("Kind", found[1]), int(found[2]))
        if _is_number(text, U64_MAX):
            return int(text)
        raise self._bad(name, f"{word}, an entry number, block:N or batch:N")

    def bound(self, which: str, word: str, default: int | None) -> Offset:
        """Where a query starts or ends, by an offset or a time."""
        time = self._texts.get(f"{which}Timestamp")
        if time is None:
            return self.offset(f"{which}Offset", word, default)
        if f"{which}Offset" in self._texts:
            raise UsageError(f"give {which}Offset or {which}Timestamp, not both")
        try:
            return StartTime(moment_ms(time))
        except BadArgument as error:
            raise UsageError(f"option {which}Timestamp: {error}") from None

    def selection(self, table: str) -> Selection | None:
        types, prefixes = (
            [part.strip() for part in self._texts[name].split(",")] if name in self._texts else []
            for name in ("types", "prefixes")
        )
        if table != ENTRIES and (types or prefixes):
            raise UsageError(
                f"the options types and prefixes are for the table {ENTRIES}: leave them out for "
                f"the table {table}"
            )
        if not all(_is_number(part, U32_MAX) for part in types):
            raise self._bad("types", f"numbers from 0 to {U32_MAX}, separated by commas")
        try:
            return with_prefixes([int(part) for part in types], prefixes)
        except UsageError as error:
            raise UsageError(f"option prefixes: {error}") from None

    def transaction(self) -> tuple[str, int] | None:
        version = self.number("txnVersion", None, U64_MAX >> 1)
        application = self._texts.get("txnAppId")
        if (version is None) != (application is None):
            raise UsageError("the options txnAppId and txnVersion belong together: give both")
        return None if application is None else (application, version)

    def count(self, name: str) -> int | None:
        return self.number(name, None, U64_MAX, least=1)  # type: ignore[no-any-return]

    def size(self, name: str, default: Any) -> Any:
        text = self._texts.get(name)
        if text is None:
            return default
        found = _SIZE.fullmatch(text)
        size = 0 if found is None else int(found[1]) * _UNITS[found[2].lower()]
        if not size:
            raise self._bad(name, "a number of bytes, such as 134217728 or 128m")
        return size

    def flag(self, name: str) -> bool | None:
        text = self._texts.get(name, "").lower()
        if text not in ("", "true", "false"):
            raise self._bad(name, "true or false")
        return None if not text else text == "true"

    def number(self, name: str, default: Any, most: int, *, least: int = 0) -> Any:
        text = self._texts.get(name)
        if text is None:
            return default
        if not _is_number(text, most) or int(text) < least:
            raise self._bad(name, f"a number from {least} to {most}")
        return int(text)

    def seconds(
        self, name: str, default: float, *, least: float = 0.0, endless: str | None = None
    ) -> float:
        text = self._texts.get(name, str(default))
        if text.lower() == endless:
            return float("inf")
        try:
            seconds = float(text)
        except ValueError:
            seconds = -1.0
        if not least <= seconds <= MOST_SECONDS:
            wanted = f"a number of seconds{f' or {endless}' if endless else ''}"
            bounds = f"{least:g} or more and at most {MOST_SECONDS:g}"
            raise self._bad(name, f"{wanted}, {bounds}")
        return seconds

    def tls(self) -> TLS | None:
        names = {
            "ca": "tlsCa",
            "certificate": "tlsCert",
            "key": "tlsKey",
            "server_name": "tlsServerName",
        }
        given = {field: self._texts.get(name) for field, name in names.items()}
        wanted = self.flag("tls")
        if wanted is False or (wanted is None and not any(given.values())):
            return None
        return TLS(**given)


def _is_number(text: str, most: int) -> bool:
    # int() of thousands of digits raises an error of its own.
    return text.isdecimal() and len(text) <= 20 and int(text) <= most
