"""A stream server: an append-only file of numbered entries, served over TCP.

The public names are those of this package and of `datastreamer.aio`, `.errors`, `.zkevm`,
`.arrow`, `.spark` and `.reassembly`. All but the exceptions are loaded when first used, so that
importing the package loads neither trio nor lmdb.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from datastreamer import errors
from datastreamer._lazy import load_on_use
from datastreamer._version import __version__ as __version__
from datastreamer.errors import *  # noqa: F403

if TYPE_CHECKING:
    from datastreamer._codec import Entry as Entry
    from datastreamer._codec import EntryBatch as EntryBatch
    from datastreamer.archive.options import ArchiveOptions as ArchiveOptions
    from datastreamer.archive.reading import Archive as Archive
    from datastreamer.client.async_client import Batches as Batches
    from datastreamer.client.async_client import Client as Client
    from datastreamer.client.async_client import Entries as Entries
    from datastreamer.client.blocking_client import BlockingClient as BlockingClient
    from datastreamer.client.trio_driver import connect as connect
    from datastreamer.client.upstream import Upstream as Upstream
    from datastreamer.consumer.async_reassembly import Reassembly as Reassembly
    from datastreamer.consumer.blocking_reassembly import BlockingReassembly as BlockingReassembly
    from datastreamer.consumer.sqlite_store import SqliteStore as SqliteStore
    from datastreamer.consumer.state import SourceBack as SourceBack
    from datastreamer.consumer.state import SourceFailed as SourceFailed
    from datastreamer.consumer.state import SourceLost as SourceLost
    from datastreamer.consumer.state import SourceRolledBack as SourceRolledBack
    from datastreamer.consumer.trio_reassembly import reassemble as reassemble
    from datastreamer.format import Header as Header
    from datastreamer.http.options import HttpOptions as HttpOptions
    from datastreamer.position import CursorStore as CursorStore
    from datastreamer.position import Position as Position
    from datastreamer.protocol.following import RangeHash as RangeHash
    from datastreamer.protocol.messages import Capabilities as Capabilities
    from datastreamer.protocol.resume import Rollback as Rollback
    from datastreamer.protocol.retry import Backoff as Backoff
    from datastreamer.publisher.async_publisher import PublishedOp as PublishedOp
    from datastreamer.publisher.async_publisher import Publisher as Publisher
    from datastreamer.publisher.blocking_publisher import BlockingPublisher as BlockingPublisher
    from datastreamer.publisher.trio_publisher import connect_publisher as connect_publisher
    from datastreamer.relay.relay import Relay as Relay
    from datastreamer.selection.clauses import Where as Where
    from datastreamer.selection.times import TimeMarks as TimeMarks
    from datastreamer.server.limits import Limits as Limits
    from datastreamer.server.publish.policy import Publishing as Publishing
    from datastreamer.service.blocking_relay import BlockingRelay as BlockingRelay
    from datastreamer.service.embedded import StreamServer as StreamServer
    from datastreamer.service.serve import serve as serve
    from datastreamer.storage.bookmarks.interface import BookmarkIndex as BookmarkIndex
    from datastreamer.storage.bookmarks.interface import Watermark as Watermark
    from datastreamer.storage.bookmarks.registry import register_index as register_index
    from datastreamer.storage.cursors import FileCursor as FileCursor
    from datastreamer.storage.cursors import LmdbCursor as LmdbCursor
    from datastreamer.storage.maintain.snapshot import Snapshot as Snapshot
    from datastreamer.storage.maintain.snapshot import snapshot as snapshot
    from datastreamer.storage.stream import DataStream as DataStream
    from datastreamer.storage.view import IndexName as IndexName
    from datastreamer.storage.write.atomic_op import AtomicOp as AtomicOp
    from datastreamer.storage.write.background import PendingCommit as PendingCommit
    from datastreamer.storage.write.sync_policy import SyncPolicy as SyncPolicy
    from datastreamer.transport.tls import ServerTLS as ServerTLS
    from datastreamer.transport.tls import client_tls as client_tls

_names, __getattr__, __dir__ = load_on_use(
    __name__,
    {
        "_codec": ("Entry", "EntryBatch"),
        "archive.options": ("ArchiveOptions",),
        "archive.reading": ("Archive",),
        "client.async_client": ("Batches", "Client", "Entries"),
        "client.blocking_client": ("BlockingClient",),
        "client.trio_driver": ("connect",),
        "client.upstream": ("Upstream",),
        "consumer.async_reassembly": ("Reassembly",),
        "consumer.blocking_reassembly": ("BlockingReassembly",),
        "consumer.sqlite_store": ("SqliteStore",),
        "consumer.state": ("SourceBack", "SourceFailed", "SourceLost", "SourceRolledBack"),
        "consumer.trio_reassembly": ("reassemble",),
        "format": ("Header",),
        "http.options": ("HttpOptions",),
        "position": ("CursorStore", "Position"),
        "protocol.following": ("RangeHash",),
        "protocol.messages": ("Capabilities",),
        "protocol.resume": ("Rollback",),
        "protocol.retry": ("Backoff",),
        "publisher.async_publisher": ("PublishedOp", "Publisher"),
        "publisher.blocking_publisher": ("BlockingPublisher",),
        "publisher.trio_publisher": ("connect_publisher",),
        "relay.relay": ("Relay",),
        "selection.clauses": ("Where",),
        "selection.times": ("TimeMarks",),
        "server.limits": ("Limits",),
        "server.publish.policy": ("Publishing",),
        "service.blocking_relay": ("BlockingRelay",),
        "service.embedded": ("StreamServer",),
        "service.serve": ("serve",),
        "storage.bookmarks.interface": ("BookmarkIndex", "Watermark"),
        "storage.bookmarks.registry": ("register_index",),
        "storage.cursors": ("FileCursor", "LmdbCursor"),
        "storage.maintain.snapshot": ("Snapshot", "snapshot"),
        "storage.stream": ("DataStream",),
        "storage.view": ("IndexName",),
        "storage.write.atomic_op": ("AtomicOp",),
        "storage.write.background": ("PendingCommit",),
        "storage.write.sync_policy": ("SyncPolicy",),
        "transport.tls": ("ServerTLS", "client_tls"),
    },
)

__all__ = [*_names, *errors.__all__, "__version__"]
