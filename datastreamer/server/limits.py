"""What a server puts up with: how many clients, how fast, and how long it waits for them.

Owns the numbers and their defaults, and how many clients the process has descriptors for.
Knows no connection.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import resource
from dataclasses import dataclass
from typing import Any, Final

from datastreamer.errors import UsageError
from datastreamer.transport.listeners import is_local

MAX_CLIENTS: Final = 10_000
INACTIVITY_SECONDS: Final = 120.0
GRACE_SECONDS: Final = 5.0
MAX_BATCH_COUNT: Final = 1 << 18
MAX_BATCH_BYTES: Final = 4 << 20

RESERVED_CLIENTS: Final = 8
PROVISIONAL_CLIENTS: Final = 32
"""Connections beyond all places that may prove who they are, at the same time."""

_LEAST_OF_ADDRESS: Final = 64
_SHARE_OF_ADDRESS: Final = 10

_AT_LEAST_ONE = ("max_clients", "max_batch_count", "max_batch_bytes", "shared_by")
_OWN_DEFAULT = ("max_clients_per_address", "reserved_clients")
_WHOLE = (*_AT_LEAST_ONE, *_OWN_DEFAULT)

# Descriptors beside those of clients: index, log, threads, the metrics port, a file that is
# opened meanwhile.
_SPARE_DESCRIPTORS = 96


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """Limits of a server. Times are in seconds. None means no limit, and so does 0, but for
    `grace`, `max_clients_per_address` and `reserved_clients`.

    Raises `UsageError` for numbers that make no sense.
    """

    max_clients: int = MAX_CLIENTS
    """Connections at a time; fewer where the process may not have so many descriptors."""

    max_clients_per_address: int | None = None
    """Of these, from one address, or of IPv6 from one network of 64 bits; a Unix socket is one
    address. None: a tenth of `max_clients`, 64 at least, and no limit for loopback and Unix
    sockets. 0: no limit. Clients that prove who they are are not refused for it."""

    reserved_clients: int | None = None
    """Places beyond `max_clients` for clients that prove who they are: publishers, and those with
    a client certificate or a token of `client_token_file`. None: 8. Without any way to prove it
    none are kept."""

    client_token_file: str | None = None
    """A file with a token on each line; a client that shows one may have a reserved place."""

    accept_rate: float | None = None
    """Connections let in a second; whoever comes faster waits in the system's queue."""

    request_rate: float | None = None
    """Commands taken from one client a second; one that asks faster waits for its answers."""

    inactivity_timeout: float | None = INACTIVITY_SECONDS
    """A client that neither streams nor asks, nor takes answers, is ended after it."""

    write_timeout: float | None = None
    """A client that takes not one byte of what is there for it is ended after it. None:
    never. One that is slow is not ended."""

    max_batch_count: int = MAX_BATCH_COUNT
    """Entries that are sent for one request of a batch; one that asks for more gets these."""

    max_batch_bytes: int = MAX_BATCH_BYTES
    """Bytes of these, heads included; a single entry may be larger."""

    handshake_timeout: float | None = 60.0
    """A client that has sent nothing since it came is ended after it."""

    command_timeout: float | None = 30.0
    """A client that has sent half a command is ended after it, counted from its beginning."""

    dead_peer_timeout: float | None = 60.0
    """A host that confirms nothing of what was sent to it, again and again, is taken for dead
    after it. A living host whose program reads nothing confirms that it is there."""

    grace: float = GRACE_SECONDS
    """At the end of the server, how long clients have to take what is committed."""

    shared_by: int = 1
    """How many processes serve together, each with such a share of the whole (`share`)."""

    def __post_init__(self) -> None:
        if self.client_token_file is not None:
            # A serving process may have another working directory.
            object.__setattr__(self, "client_token_file", os.path.abspath(self.client_token_file))
        for field in dataclasses.fields(self):
            if field.name == "client_token_file":
                continue
            value = getattr(self, field.name)
            optional = field.name not in ("grace", *_AT_LEAST_ONE)
            if value is None and optional:
                continue
            whole = field.name in _WHOLE
            if (
                isinstance(value, bool)
                or not isinstance(value, int if whole else (int, float))
                or not math.isfinite(value)
                or value < 0
                or (value < 1 and field.name in _AT_LEAST_ONE)
            ):
                what = f"a whole number from {int(not optional)}" if whole else "a number from 0"
                raise UsageError(f"{field.name} is {what}{' or None' * optional}, not {value!r}")
            if optional and value == 0 and field.name not in _OWN_DEFAULT:
                object.__setattr__(self, field.name, None)

    def most_of(self, host: str) -> int | None:
        """How many clients of `host`, as `host_of` gives it, may be connected; None: any number."""
        if self.max_clients_per_address is not None:
            return self.max_clients_per_address or None
        if is_local(host):
            return None
        return max(_LEAST_OF_ADDRESS, self.max_clients * self.shared_by // _SHARE_OF_ADDRESS)

    @property
    def reserved(self) -> int:
        """Places beyond `max_clients` of this process, where clients can prove who they are."""
        if self.reserved_clients is None:
            return -(-RESERVED_CLIENTS // self.shared_by)
        return self.reserved_clients

    def share(self, at: int, of: int) -> Limits:
        """Those of number `at` of `of` processes that serve together: all together let in as
        many, and as fast. Clients of an address are counted together (`turns.py`); what is
        counted by client each counts by itself. Where places are reserved each has one at least.

        Raises `UsageError` where there are fewer clients than processes.
        """
        if self.max_clients < of:
            raise UsageError(
                f"{of} workers for at most {self.max_clients} clients: each takes one at least"
            )
        return dataclasses.replace(
            self,
            max_clients=self.max_clients // of + (at < self.max_clients % of),
            reserved_clients=self.reserved_clients and -(-self.reserved_clients // of),
            shared_by=of,
            accept_rate=None if self.accept_rate is None else self.accept_rate / of,
        )

    def as_json(self) -> dict[str, Any]:
        """Plain values: ``Limits(**limits.as_json()) == limits``."""
        return dataclasses.asdict(self)


def room_for_clients(wanted: int) -> tuple[int, int]:
    """How many of `wanted` clients there are descriptors for, and the limit of descriptors.

    Raises the process's soft limit as far as is needed and allowed.
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
