"""The errors and log lines for a server that cannot be reached, the same for all clients.

Knows neither trio nor the protocol.
"""

from __future__ import annotations

import logging
import os

from datastreamer.errors import (
    ConnectFailed,
    ConnectionLost,
    EntriesDamaged,
    NoAnswer,
    PeerError,
    ServerBehind,
    UsageError,
)
from datastreamer.protocol.arguments import is_number


def check_port(port: int) -> None:
    """Raises `UsageError` for a number that is not a port."""
    if not is_number(port, 1, 65535):
        raise UsageError(f"a port to connect to is a number from 1 to 65535, not {port!r}")


def connect_failed(peer: str, error: OSError | UnicodeError) -> ConnectFailed:
    """The exception for a failed connection, or a name that no host can have."""
    hint = ""
    if isinstance(_cause(error), ConnectionRefusedError | FileNotFoundError):
        hint = "; is a server running there?"
    return ConnectFailed(f"cannot connect to {peer}: {_reason(error)}{hint}")


def connect_timeout(peer: str, timeout: float) -> ConnectFailed:
    return ConnectFailed(f"cannot connect to {peer}: no answer within {timeout:g} s")


def answer_timeout(peer: str, timeout: float) -> NoAnswer:
    return NoAnswer(f"no answer from {peer} within {timeout:g} s")


def connection_lost(peer: str, error: Exception) -> PeerError:
    """The exception for a connection that broke.

    A server's refusal of the client certificate is only seen when its answer is read.
    """
    inner: BaseException = error
    while inner.__cause__ is not None:
        inner = inner.__cause__
    if "_ALERT_" in (getattr(inner, "reason", None) or ""):
        from datastreamer.transport.tls import tls_failed

        return tls_failed(peer, inner)
    why = _reason(error)
    return ConnectionLost(f"the connection to {peer} is lost: {why}; connect again")


def closed_here(peer: str) -> ConnectionLost:
    """The exception for a connection that this side closed during a wait."""
    return ConnectionLost(f"the connection to {peer} was closed here")


def silent_server(peer: str, seconds: float, error: PeerError) -> ConnectionLost:
    """The exception for a server that sends nothing and does not answer a second connection."""
    kind = NoAnswer if isinstance(error, NoAnswer) else ConnectionLost
    return kind(f"nothing received from {peer} for {seconds:g} s, and {error}")


def silent_twice(peer: str, seconds: float, timeout: float) -> NoAnswer:
    """The exception for a server that is silent, and on another connection too."""
    return NoAnswer(
        f"nothing received from {peer} for {seconds:g} s, and no answer on another connection "
        f"within {timeout:g} s"
    )


def host_silent(peer: str, seconds: float) -> NoAnswer:
    return NoAnswer(f"the host of {peer} has not acknowledged anything for {seconds:.0f} s")


def say_lost(log: logging.Logger, peer: str, error: PeerError) -> None:
    """Log a lost server, or one whose copy is damaged or lags, once, not at each attempt."""
    if isinstance(error, EntriesDamaged | ServerBehind):
        log.warning("%s, trying again: %s", peer, error)
        return
    log.warning("lost the connection to %s, trying again: %s", peer, str(error).partition(";")[0])


def say_back(log: logging.Logger, peer: str, number: int | None, *, again: bool = True) -> None:
    """Log that a server is connected, the same one `again`."""
    where = f"{peer} again" if again else peer
    if number is None:
        log.warning("connected to %s", where)
    else:
        log.warning("connected to %s, continuing at entry %d", where, number)


def _cause(error: BaseException) -> BaseException:
    """The error of the system; of several, the first."""
    while error.__cause__ is not None:
        error = error.__cause__
    # Trio reports all addresses that it tried.
    first: BaseException = next(iter(getattr(error, "exceptions", ())), error)
    return first


def _reason(error: BaseException) -> str:
    """The system's message, without error numbers."""
    error = _cause(error)
    # OpenSSL's errors have numbers of their own.
    openssl = getattr(error, "reason", None)
    if isinstance(openssl, str) and isinstance(error, OSError):
        return f"TLS: {openssl.lower().replace('_', ' ')}"
    number = error.errno if isinstance(error, OSError) else None
    if number is not None and number > 0:
        return os.strerror(number)
    return getattr(error, "strerror", None) or str(error) or type(error).__name__
