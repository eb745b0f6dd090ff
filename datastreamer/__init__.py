"""A stream server: an append-only file of numbered entries, served over TCP.

The public names are here and are loaded when first used, so that importing the
package costs nothing and pulls in neither trio nor lmdb.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from datastreamer._version import __version__ as __version__

if TYPE_CHECKING:
    from datastreamer._codec import Entry as Entry
    from datastreamer._codec import EntryBatch as EntryBatch
    from datastreamer.client.blocking import BlockingClient as BlockingClient
    from datastreamer.client.thread_parallel import (
        blocking_parallel_read as blocking_parallel_read,
    )
    from datastreamer.client.trio import Client as Client
    from datastreamer.client.trio import connect as connect
    from datastreamer.client.trio_parallel import parallel_read as parallel_read
    from datastreamer.client.upstream import Upstream as Upstream
    from datastreamer.consumer.blocking import BlockingReassembly as BlockingReassembly
    from datastreamer.consumer.sqlite_store import SqliteStore as SqliteStore
    from datastreamer.consumer.trio import reassemble as reassemble
    from datastreamer.errors import DatastreamerError as DatastreamerError
    from datastreamer.format import Header as Header
    from datastreamer.position import CursorStore as CursorStore
    from datastreamer.position import Position as Position
    from datastreamer.protocol.resume import Rollback as Rollback
    from datastreamer.protocol.retry import Backoff as Backoff
    from datastreamer.publisher.blocking import BlockingPublisher as BlockingPublisher
    from datastreamer.publisher.trio import Publisher as Publisher
    from datastreamer.publisher.trio import connect_publisher as connect_publisher
    from datastreamer.relay.relay import Relay as Relay
    from datastreamer.server.limits import Limits as Limits
    from datastreamer.server.publish.policy import Publishing as Publishing
    from datastreamer.server.server import serve as serve
    from datastreamer.service.blocking_relay import BlockingRelay as BlockingRelay
    from datastreamer.service.embedded import StreamServer as StreamServer
    from datastreamer.storage.cursors import FileCursor as FileCursor
    from datastreamer.storage.cursors import LmdbCursor as LmdbCursor
    from datastreamer.storage.stream import DataStream as DataStream
    from datastreamer.transport.tls import ServerTLS as ServerTLS
    from datastreamer.transport.tls import client_tls as client_tls

_HOME = {
    "Backoff": "datastreamer.protocol.retry",
    "BlockingClient": "datastreamer.client.blocking",
    "BlockingPublisher": "datastreamer.publisher.blocking",
    "BlockingReassembly": "datastreamer.consumer.blocking",
    "BlockingRelay": "datastreamer.service.blocking_relay",
    "Client": "datastreamer.client.trio",
    "CursorStore": "datastreamer.position",
    "DataStream": "datastreamer.storage.stream",
    "DatastreamerError": "datastreamer.errors",
    "Entry": "datastreamer._codec",
    "EntryBatch": "datastreamer._codec",
    "FileCursor": "datastreamer.storage.cursors",
    "Header": "datastreamer.format",
    "Limits": "datastreamer.server.limits",
    "LmdbCursor": "datastreamer.storage.cursors",
    "Position": "datastreamer.position",
    "Publisher": "datastreamer.publisher.trio",
    "Publishing": "datastreamer.server.publish.policy",
    "Relay": "datastreamer.relay.relay",
    "Rollback": "datastreamer.protocol.resume",
    "ServerTLS": "datastreamer.transport.tls",
    "SqliteStore": "datastreamer.consumer.sqlite_store",
    "StreamServer": "datastreamer.service.embedded",
    "Upstream": "datastreamer.client.upstream",
    "blocking_parallel_read": "datastreamer.client.thread_parallel",
    "client_tls": "datastreamer.transport.tls",
    "connect": "datastreamer.client.trio",
    "connect_publisher": "datastreamer.publisher.trio",
    "parallel_read": "datastreamer.client.trio_parallel",
    "reassemble": "datastreamer.consumer.trio",
    "serve": "datastreamer.server.server",
}

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
