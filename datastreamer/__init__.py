"""A stream server: an append-only file of numbered entries, served over TCP.

The public names are those of this package and of `datastreamer.aio`, `.errors`, `.zkevm`,
`.arrow`, `.spark` and `.reassembly`. All but the exceptions are loaded when first used, so that
importing the package loads neither trio nor lmdb.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from datastreamer import errors
from datastreamer._version import __version__ as __version__
from datastreamer.errors import *  # noqa: F403

if TYPE_CHECKING:
    from datastreamer._codec import Entry as Entry
    from datastreamer._codec import EntryBatch as EntryBatch
    from datastreamer.client.async_client import Client as Client
    from datastreamer.client.blocking_client import BlockingClient as BlockingClient
    from datastreamer.client.trio_driver import connect as connect
    from datastreamer.client.upstream import Upstream as Upstream
    from datastreamer.consumer.blocking_reassembly import BlockingReassembly as BlockingReassembly
    from datastreamer.consumer.sqlite_store import SqliteStore as SqliteStore
    from datastreamer.consumer.state import SourceBack as SourceBack
    from datastreamer.consumer.state import SourceFailed as SourceFailed
    from datastreamer.consumer.state import SourceLost as SourceLost
    from datastreamer.consumer.state import SourceRolledBack as SourceRolledBack
    from datastreamer.consumer.trio_reassembly import reassemble as reassemble
    from datastreamer.format import Header as Header
    from datastreamer.position import CursorStore as CursorStore
    from datastreamer.position import Position as Position
    from datastreamer.protocol.resume import Rollback as Rollback
    from datastreamer.protocol.retry import Backoff as Backoff
    from datastreamer.publisher.async_publisher import Publisher as Publisher
    from datastreamer.publisher.blocking_publisher import BlockingPublisher as BlockingPublisher
    from datastreamer.publisher.trio_publisher import connect_publisher as connect_publisher
    from datastreamer.relay.relay import Relay as Relay
    from datastreamer.server.limits import Limits as Limits
    from datastreamer.server.publish.policy import Publishing as Publishing
    from datastreamer.server.server import serve as serve
    from datastreamer.service.blocking_relay import BlockingRelay as BlockingRelay
    from datastreamer.service.embedded import StreamServer as StreamServer
    from datastreamer.storage.bookmarks.interface import BookmarkIndex as BookmarkIndex
    from datastreamer.storage.bookmarks.interface import Watermark as Watermark
    from datastreamer.storage.bookmarks.registry import register_index as register_index
    from datastreamer.storage.cursors import FileCursor as FileCursor
    from datastreamer.storage.cursors import LmdbCursor as LmdbCursor
    from datastreamer.storage.maintain.snapshot import Snapshot as Snapshot
    from datastreamer.storage.maintain.snapshot import snapshot as snapshot
    from datastreamer.storage.stream import DataStream as DataStream
    from datastreamer.transport.tls import ServerTLS as ServerTLS
    from datastreamer.transport.tls import client_tls as client_tls

_HOME = {
    "Backoff": "datastreamer.protocol.retry",
    "BlockingClient": "datastreamer.client.blocking_client",
    "BlockingPublisher": "datastreamer.publisher.blocking_publisher",
    "BlockingReassembly": "datastreamer.consumer.blocking_reassembly",
    "BlockingRelay": "datastreamer.service.blocking_relay",
    "BookmarkIndex": "datastreamer.storage.bookmarks.interface",
    "Client": "datastreamer.client.async_client",
    "CursorStore": "datastreamer.position",
    "DataStream": "datastreamer.storage.stream",
    "Entry": "datastreamer._codec",
    "EntryBatch": "datastreamer._codec",
    "FileCursor": "datastreamer.storage.cursors",
    "Header": "datastreamer.format",
    "Limits": "datastreamer.server.limits",
    "LmdbCursor": "datastreamer.storage.cursors",
    "Position": "datastreamer.position",
    "Publisher": "datastreamer.publisher.async_publisher",
    "Publishing": "datastreamer.server.publish.policy",
    "Relay": "datastreamer.relay.relay",
    "Rollback": "datastreamer.protocol.resume",
    "ServerTLS": "datastreamer.transport.tls",
    "Snapshot": "datastreamer.storage.maintain.snapshot",
    "SourceBack": "datastreamer.consumer.state",
    "SourceFailed": "datastreamer.consumer.state",
    "SourceLost": "datastreamer.consumer.state",
    "SourceRolledBack": "datastreamer.consumer.state",
    "SqliteStore": "datastreamer.consumer.sqlite_store",
    "StreamServer": "datastreamer.service.embedded",
    "Upstream": "datastreamer.client.upstream",
    "Watermark": "datastreamer.storage.bookmarks.interface",
    "client_tls": "datastreamer.transport.tls",
    "connect": "datastreamer.client.trio_driver",
    "connect_publisher": "datastreamer.publisher.trio_publisher",
    "reassemble": "datastreamer.consumer.trio_reassembly",
    "register_index": "datastreamer.storage.bookmarks.registry",
    "serve": "datastreamer.server.server",
    "snapshot": "datastreamer.storage.maintain.snapshot",
}

__all__ = [*_HOME, *errors.__all__, "__version__"]


def __getattr__(name: str) -> Any:
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME})
