"""Limits of a server: number of clients, rates, sizes and timeouts.

Owns the values and their defaults, and how many clients the process has descriptors for. Knows no
connection.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import resource
from dataclasses import dataclass
from typing import Final

from datastreamer.errors import UsageError
from datastreamer.storage.objects import CACHE_BYTES, TIMEOUT
from datastreamer.transport.listeners import is_local

MAX_CLIENTS: Final = 10_000
INACTIVITY_SECONDS: Final = 120.0
GRACE_SECONDS: Final = 5.0
MAX_BATCH_COUNT: Final = 1 << 18
MAX_BATCH_BYTES: Final = 4 << 20

RESERVED_CLIENTS: Final = 8
PROVISIONAL_CLIENTS: Final = 32
"""Provisional slots: connections beyond all limits that may prove their identity."""

_LEAST_OF_ADDRESS: Final = 64
_SHARE_OF_ADDRESS: Final = 10

_PATHS = ("client_token_file", "archive_cache_dir")
_NUMBERS = ("max_clients", "max_batch_count", "max_batch_bytes", "archive_cache", "shared_by")
_AT_LEAST_ONE = (*_NUMBERS, "archive_timeout")
_OWN_DEFAULT = ("max_clients_per_address", "reserved_clients")
_WHOLE = (*_NUMBERS, *_OWN_DEFAULT)

# Descriptors in addition to the clients': index, log, threads, metrics port, files opened
# meanwhile.
_SPARE_DESCRIPTORS = 96


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """Limits of a server. Times are in seconds. None means no limit, and so does 0, but for
    `grace`, `max_clients_per_address` and `reserved_clients`.

    Raises `UsageError` for a value out of range.
    """

    max_clients: int = MAX_CLIENTS
    """Maximum number of connections; lowered if the process may not have that many descriptors."""

    max_clients_per_address: int | None = None
    """Maximum number of connections from one address; for IPv6 from one /64 network; all clients of
    a Unix socket count as one address. None: a tenth of `max_clients`, at least 64, and no limit
    for loopback and Unix sockets. 0: no limit. Does not apply to clients that prove their
    identity."""

    reserved_clients: int | None = None
    """Slots beyond `max_clients` for clients that prove their identity: publishers, and clients
    with a client certificate or a token of `client_token_file`. None: 8. Without any way to prove
    an identity there are none."""

    client_token_file: str | None = None
    """A file with one token per line; a client that presents one may use a reserved slot."""

    accept_rate: float | None = None
    """Connections accepted per second; more wait in the system's queue."""

    request_rate: float | None = None
    """Commands executed per second for one client; a faster client waits for its answers."""

    inactivity_timeout: float | None = INACTIVITY_SECONDS
    """A client that neither streams, nor sends commands, nor receives answers is disconnected after
    this time."""

    write_timeout: float | None = None
    """A client that receives not one byte of the data waiting for it is disconnected after this
    time. None: never. A slow client is not disconnected."""

    max_batch_count: int = MAX_BATCH_COUNT
    """Maximum number of entries in one batch; a request for more gets this many."""

    max_batch_bytes: int = MAX_BATCH_BYTES
    """Maximum number of bytes in one batch, entry heads included; a single entry may be larger."""

    handshake_timeout: float | None = 60.0
    """A client that has sent nothing since it connected is disconnected after this time."""

    command_timeout: float | None = 30.0
    """A client that does not complete a command is disconnected this long after its first byte."""

    dead_peer_timeout: float | None = 60.0
    """A client whose host acknowledges nothing, in spite of retransmissions, is disconnected after
    this time. A host whose program reads nothing still acknowledges."""

    grace: float = GRACE_SECONDS
    """At shutdown, how long clients may receive committed entries."""

    scrub_rate: float | None = None
    """While the server is idle, it reads the pages of the stream again and again, at most this many
    bytes per second, and compares them with their checksums. None: it does not."""

    archive_cache: int = CACHE_BYTES
    """Bytes of pages that were fetched from the stream's archive, which are kept for other
    clients."""

    archive_cache_dir: str | None = None
    """The folder that has them, in files without a name. None: the stream file's."""

    archive_timeout: float = TIMEOUT
    """A client that asks for archived entries waits this long for the store, retries included."""

    shared_by: int = 1
    """Number of processes that serve together, each with its share of the limits (`share`)."""

    def __post_init__(self) -> None:
        for name in _PATHS:
            if (path := getattr(self, name)) is not None:
                # A serving process may have another working directory.
                object.__setattr__(self, name, os.path.abspath(path))
        for field in dataclasses.fields(self):
            if field.name in _PATHS:
                continue
            value = getattr(self, field.name)
            least = int(field.name in _AT_LEAST_ONE)
            optional = not least and field.name != "grace"
            if value is None and optional:
                continue
            whole = field.name in _WHOLE
            if (
                isinstance(value, bool)
                or not isinstance(value, int if whole else (int, float))
                or not math.isfinite(value)
                or value < least
            ):
                what = f"a {'whole ' * whole}number from {least}"
                raise UsageError(f"{field.name} is {what}{' or None' * optional}, not {value!r}")
            if optional and value == 0 and field.name not in _OWN_DEFAULT:
                object.__setattr__(self, field.name, None)

    def most_of(self, host: str) -> int | None:
        """Maximum number of clients of `host`, as `host_of` gives it; None: any number."""
        if self.max_clients_per_address is not None:
            return self.max_clients_per_address or None
        if is_local(host):
            return None
        return max(_LEAST_OF_ADDRESS, self.max_clients * self.shared_by // _SHARE_OF_ADDRESS)

    @property
    def reserved(self) -> int:
        """Reserved slots of this process, if clients can prove their identity."""
        if self.reserved_clients is None:
            return -(-RESERVED_CLIENTS // self.shared_by)
        return self.reserved_clients

    def share(self, at: int, of: int) -> Limits:
        """The limits of process `at` of `of` processes that serve together and share them. Clients
        of an address are counted together (`accept_balance.py`); limits for one client are
        unchanged. If slots are reserved, each process has at least one. Process 0 alone scrubs.
        Each has its share of the cache of archived pages.

        Raises `UsageError` if there are fewer clients than processes.
        """
        if self.max_clients < of:
            raise UsageError(
                f"{of} workers for at most {self.max_clients} clients: each needs at least one"
            )
        return dataclasses.replace(
            self,
            max_clients=self.max_clients // of + (at < self.max_clients % of),
            reserved_clients=self.reserved_clients and -(-self.reserved_clients // of),
            shared_by=of,
            accept_rate=None if self.accept_rate is None else self.accept_rate / of,
            scrub_rate=None if at else self.scrub_rate,
            archive_cache=-(-self.archive_cache // of),
        )


def room_for_clients(wanted: int) -> tuple[int, int]:
    """How many of `wanted` clients the process has descriptors for, and its descriptor limit.

    Raises the soft limit as far as needed and allowed.
    """
    needed = wanted + _open_descriptors() + _SPARE_DESCRIPTORS
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < needed:
        more = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (more, hard))
            soft = more
    if soft == resource.RLIM_INFINITY:
        return wanted, needed
    return max(1, min(wanted, wanted - (needed - soft))), soft


def _open_descriptors() -> int:
    try:
        return len(os.listdir("/dev/fd"))
    except OSError:
        return _SPARE_DESCRIPTORS
