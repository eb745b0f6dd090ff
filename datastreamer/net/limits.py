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

MAX_CLIENTS: Final = 10_000
INACTIVITY_SECONDS: Final = 120.0
GRACE_SECONDS: Final = 5.0
MAX_BATCH_COUNT: Final = 1 << 18
MAX_BATCH_BYTES: Final = 4 << 20

_AT_LEAST_ONE = ("max_clients", "max_batch_count", "max_batch_bytes")
_WHOLE = (*_AT_LEAST_ONE, "max_clients_per_address")

# Descriptors beside those of clients: index, log, threads, a file that is opened meanwhile.
_SPARE_DESCRIPTORS = 32


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """Limits of a server. Times are in seconds. None means no limit, and so does 0, but for
    `grace`.

    Raises `UsageError` for numbers that make no sense.
    """

    max_clients: int = MAX_CLIENTS
    """Connections at a time; fewer where the process may not have so many descriptors."""

    max_clients_per_address: int | None = None
    """Of these, from one address, or of IPv6 from one network of 64 bits; a Unix socket is one
    address."""

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

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
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
            if optional and value == 0:
                object.__setattr__(self, field.name, None)

    def share(self, at: int, of: int) -> Limits:
        """Those of number `at` of `of` processes that serve together: all together let in as
        many, and as fast. Clients of an address are counted together (`turns.py`); what is
        counted by client each counts by itself.

        Raises `UsageError` where there are fewer clients than processes.
        """
        if self.max_clients < of:
            raise UsageError(
                f"{of} workers for at most {self.max_clients} clients: each takes one at least"
            )
        return dataclasses.replace(
            self,
            max_clients=self.max_clients // of + (at < self.max_clients % of),
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
