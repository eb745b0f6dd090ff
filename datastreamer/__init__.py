"""A stream server: an append-only file of numbered entries, served over TCP.

The public names are here and are loaded when first used, so that importing the
package costs nothing and pulls in neither trio nor lmdb.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from datastreamer._codec import Entry as Entry
    from datastreamer._codec import EntryBatch as EntryBatch
    from datastreamer.errors import DatastreamerError as DatastreamerError
    from datastreamer.format import Header as Header
    from datastreamer.net.blocking import BlockingClient as BlockingClient
    from datastreamer.net.blocking_parallel import (
        blocking_parallel_read as blocking_parallel_read,
    )
    from datastreamer.net.blocking_publisher import BlockingPublisher as BlockingPublisher
    from datastreamer.net.blocking_reassemble import BlockingReassembly as BlockingReassembly
    from datastreamer.net.blocking_relay import BlockingRelay as BlockingRelay
    from datastreamer.net.client import Client as Client
    from datastreamer.net.client import connect as connect
    from datastreamer.net.embed import StreamServer as StreamServer
    from datastreamer.net.limits import Limits as Limits
    from datastreamer.net.parallel import parallel_read as parallel_read
    from datastreamer.net.publisher import Publisher as Publisher
    from datastreamer.net.publisher import connect_publisher as connect_publisher
    from datastreamer.net.reassemble import reassemble as reassemble
    from datastreamer.net.reassembly_store import SqliteStore as SqliteStore
    from datastreamer.net.relay import Relay as Relay
    from datastreamer.net.server import serve as serve
    from datastreamer.net.terms import Publishing as Publishing
    from datastreamer.net.tls import ServerTLS as ServerTLS
    from datastreamer.net.tls import client_tls as client_tls
    from datastreamer.net.upstream import Upstream as Upstream
    from datastreamer.position import CursorStore as CursorStore
    from datastreamer.position import Position as Position
    from datastreamer.protocol.endurance import Backoff as Backoff
    from datastreamer.protocol.resume import Rollback as Rollback
    from datastreamer.storage.cursors import FileCursor as FileCursor
    from datastreamer.storage.cursors import LmdbCursor as LmdbCursor
    from datastreamer.storage.stream import DataStream as DataStream

_HOME = {
    "Backoff": "datastreamer.protocol.endurance",
    "BlockingClient": "datastreamer.net.blocking",
    "BlockingPublisher": "datastreamer.net.blocking_publisher",
    "BlockingReassembly": "datastreamer.net.blocking_reassemble",
    "BlockingRelay": "datastreamer.net.blocking_relay",
    "Client": "datastreamer.net.client",
    "CursorStore": "datastreamer.position",
    "DataStream": "datastreamer.storage.stream",
    "DatastreamerError": "datastreamer.errors",
    "Entry": "datastreamer._codec",
    "EntryBatch": "datastreamer._codec",
    "FileCursor": "datastreamer.storage.cursors",
    "Header": "datastreamer.format",
    "Limits": "datastreamer.net.limits",
    "LmdbCursor": "datastreamer.storage.cursors",
    "Position": "datastreamer.position",
    "Publisher": "datastreamer.net.publisher",
    "Publishing": "datastreamer.net.terms",
    "Relay": "datastreamer.net.relay",
    "Rollback": "datastreamer.protocol.resume",
    "ServerTLS": "datastreamer.net.tls",
    "SqliteStore": "datastreamer.net.reassembly_store",
    "StreamServer": "datastreamer.net.embed",
    "Upstream": "datastreamer.net.upstream",
    "blocking_parallel_read": "datastreamer.net.blocking_parallel",
    "client_tls": "datastreamer.net.tls",
    "connect": "datastreamer.net.client",
    "connect_publisher": "datastreamer.net.publisher",
    "parallel_read": "datastreamer.net.parallel",
    "reassemble": "datastreamer.net.reassemble",
    "serve": "datastreamer.net.server",
}

__version__ = "0.1.0"
__all__ = [*_HOME, "__version__"]


def __getattr__(name: str) -> Any:
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME})
