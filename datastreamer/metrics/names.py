"""Every metric: name, kind, labels, and how the samples of several processes combine.

Owns the names, which dashboards and alerts rely on; the units are seconds and bytes. A test
compares the documentation with this table.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

Kind = Literal["counter", "gauge", "histogram", "gaugehistogram"]
Together = Literal["sum", "max", "min"]


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric. `together`: how the samples of several processes with the same labels combine;
    values that all processes share are not added up. `bounds`: the buckets of a histogram."""

    kind: Kind
    help: str
    together: Together = "sum"
    labels: tuple[str, ...] = ()
    bounds: tuple[float, ...] = ()


# 5 us to 10 s; a commit without a sync takes some 6 us, one with it 100 us to a second.
TIME_BOUNDS_NS: Final = (
    *(5_000, 10_000, 25_000, 50_000, 100_000, 250_000, 500_000),
    *(1_000_000, 2_500_000, 5_000_000, 10_000_000, 25_000_000, 50_000_000),
    *(100_000_000, 250_000_000, 500_000_000, 1_000_000_000, 2_500_000_000, 10_000_000_000),
)
_SECONDS: Final = tuple(bound / 1e9 for bound in TIME_BOUNDS_NS)
_ENTRIES: Final = tuple(float(10**power) for power in range(9))
_BYTES: Final = tuple(float(1 << power) for power in range(10, 41, 3))

METRICS: Final[dict[str, Metric]] = {
    "datastreamer_build_info": Metric(
        "gauge",
        "Always 1; the labels name the versions of the package and of Python.",
        "max",
        ("version", "python"),
    ),
    # The stream.
    "datastreamer_head_entries": Metric(
        "gauge", "Entries that clients can see, which is the number of the next entry.", "max"
    ),
    "datastreamer_head_bytes": Metric(
        "gauge", "Bytes of the stream up to the head, header and padding included.", "max"
    ),
    "datastreamer_file_replaced": Metric(
        "gauge",
        "1 while the stream's path names no file or a file other than the open one, else 0.",
        "max",
    ),
    "datastreamer_tls_certificate_expiry_seconds": Metric(
        "gauge",
        "Unix time when the first of the server's TLS certificates expires; absent without TLS.",
        "min",
    ),
    "datastreamer_index_lag_bytes": Metric(
        "gauge", "Bytes of entries whose bookmarks are not indexed yet.", "max"
    ),
    "datastreamer_index_lag_entries": Metric(
        "gauge", "Entries whose bookmarks are not indexed yet.", "max"
    ),
    "datastreamer_index_on_disk": Metric(
        "gauge",
        "1 if the bookmark index is on disk; 0 if it is in memory or look-ups read the stream.",
        "min",
    ),
    # The writer; every process that serves its file reads the same counters.
    "datastreamer_committed_operations_total": Metric(
        "counter", "Atomic operations committed since the writer opened the stream.", "max"
    ),
    "datastreamer_committed_entries_total": Metric(
        "counter", "Entries in these operations.", "max"
    ),
    "datastreamer_committed_bytes_total": Metric(
        "counter", "Bytes that these operations added to the file, padding included.", "max"
    ),
    "datastreamer_commit_failures_total": Metric(
        "counter", "Writes and syncs that failed, for example because the disk was full.", "max"
    ),
    "datastreamer_commit_seconds": Metric(
        "histogram",
        "Duration of commits: hashing, writing and, with --sync commit, the sync.",
        "max",
        bounds=_SECONDS,
    ),
    "datastreamer_sync_seconds": Metric(
        "histogram", "Duration of syncs to disk, background syncs included.", "max", bounds=_SECONDS
    ),
    # The archive that the writer keeps; every process that serves its file reads the same values.
    "datastreamer_archive_entries": Metric("gauge", "Entries in the archive.", "max"),
    "datastreamer_archive_lag_seconds": Metric(
        "gauge",
        "Time since when the archive lacks entries, or a relay that follows it cannot read it; 0: "
        "neither.",
        "max",
    ),
    "datastreamer_archive_lag_bytes": Metric(
        "gauge", "Bytes of the stream that the archive lacks.", "max"
    ),
    "datastreamer_archive_generation": Metric(
        "gauge", "The archive's generation, which truncations and updates raise.", "max"
    ),
    "datastreamer_archive_term": Metric(
        "gauge", "The writer's term in the archive, which each writer raises.", "max"
    ),
    "datastreamer_archive_uploaded_bytes_total": Metric(
        "counter", "Bytes of the objects that were put to the store.", "max"
    ),
    "datastreamer_archive_publications_total": Metric(
        "counter", "Manifests that were published.", "max"
    ),
    "datastreamer_archive_failures_total": Metric(
        "counter",
        "Publications that failed, and looks of a relay that follows; the log has the reasons.",
        "max",
    ),
    "datastreamer_archive_failures_in_a_row": Metric(
        "gauge", "Publications or looks that failed since the last one that did not.", "max"
    ),
    "datastreamer_archive_requests_total": Metric(
        "counter",
        "Attempts of requests to the store.",
        "max",
        labels=("operation", "outcome"),
    ),
    "datastreamer_archive_fenced": Metric(
        "gauge", "1 if another writer has taken the archive over.", "max"
    ),
    "datastreamer_archive_diverged": Metric(
        "gauge", "1 if the archive has other entries than the stream.", "max"
    ),
    "datastreamer_archive_evicted_pages": Metric(
        "gauge", "Pages of the stream, of 1 MiB, that are in the archive alone.", "max"
    ),
    "datastreamer_archive_local_bytes": Metric(
        "gauge", "Bytes of the stream's pages that are in its file.", "max"
    ),
    "datastreamer_archive_retention_bytes": Metric(
        "gauge", "Bytes that the file keeps by its retention; 0 without one, or for an age.", "max"
    ),
    # Connected clients.
    "datastreamer_clients": Metric("gauge", "Connected clients, by state.", labels=("state",)),
    "datastreamer_clients_limit": Metric("gauge", "Maximum number of connected clients."),
    "datastreamer_reserved_clients": Metric(
        "gauge", "Clients above that limit, in slots reserved for known clients."
    ),
    "datastreamer_reserved_clients_limit": Metric("gauge", "Slots reserved for known clients."),
    "datastreamer_provisional_clients": Metric(
        "gauge", "Connections with a provisional slot, which may still authenticate."
    ),
    "datastreamer_clients_lag_entries": Metric(
        "gaugehistogram", "Streaming clients by their lag in entries.", bounds=(0.0, *_ENTRIES)
    ),
    "datastreamer_clients_lag_bytes": Metric(
        "gaugehistogram",
        "Streaming clients by their lag in bytes of the file.",
        bounds=(0.0, *_BYTES),
    ),
    "datastreamer_client_lag_entries": Metric(
        "gauge",
        "Lag of a client in entries, for the clients with the largest lag.",
        labels=("client",),
    ),
    "datastreamer_client_lag_bytes": Metric(
        "gauge",
        "Lag of a client in bytes, for the clients with the largest lag.",
        labels=("client",),
    ),
    # Since the server started.
    "datastreamer_connections_accepted_total": Metric(
        "counter", "Connections accepted as clients."
    ),
    "datastreamer_connections_refused_total": Metric(
        "counter", "Connections refused, by the limit that they exceeded.", labels=("reason",)
    ),
    "datastreamer_authentication_failures_total": Metric(
        "counter",
        "Tokens and certificates that were rejected, by the command that presented them.",
        labels=("command",),
    ),
    "datastreamer_connections_ended_total": Metric(
        "counter", "Connections that ended, by reason.", labels=("reason",)
    ),
    "datastreamer_commands_total": Metric(
        "counter", "Commands received, by kind.", labels=("command",)
    ),
    "datastreamer_errors_total": Metric(
        "counter", "Requests rejected and connections failed, by kind of error.", labels=("kind",)
    ),
    "datastreamer_sent_bytes_total": Metric(
        "counter", "Bytes of entries, answers and Results handed to the sockets of clients."
    ),
    "datastreamer_sent_entries_total": Metric(
        "counter", "Entries sent completely: streamed, or in batches and ranges."
    ),
    "datastreamer_batch_read_request_seconds": Metric(
        "histogram",
        "Duration of batch reads, without the wait for a commit (BookKeeper: "
        "BATCH_READ_ENTRY_REQUEST).",
        bounds=(0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 3.0),
    ),
    "datastreamer_batch_read_response_bytes": Metric(
        "histogram",
        "Bytes of entries in the answers to batch reads (BookKeeper: "
        "BATCH_READ_ENTRY_RESPONSE_SIZE).",
        bounds=(128.0, 512.0, 1024.0, 2048.0, 4096.0, 16384.0, 131072.0, 1048576.0),
    ),
    "datastreamer_http_requests_total": Metric(
        "counter", "HTTP requests, by path and status.", labels=("path", "status")
    ),
    "datastreamer_http_sent_bytes_total": Metric(
        "counter", "Bytes handed to the sockets of HTTP clients, without those of TLS."
    ),
    "datastreamer_http_connections": Metric("gauge", "Connected HTTP clients."),
    "datastreamer_http_followers": Metric(
        "gauge", "Those of them that follow the stream by Server-Sent Events."
    ),
    "datastreamer_filter_scanned_bytes_total": Metric(
        "counter", "Bytes of the file scanned for clients of selected entries."
    ),
    "datastreamer_filter_sent_bytes_total": Metric(
        "counter", "Bytes of the entries that clients of selected entries were sent."
    ),
    "datastreamer_range_hash_seconds_total": Metric(
        "counter",
        "Duration of requests for hashes of ranges of entries, the wait for one another included.",
    ),
    "datastreamer_publish_sources": Metric("gauge", "Remote publishers that hold the lease."),
    "datastreamer_publish_epoch": Metric("gauge", "Epoch of the last lease.", "max"),
    "datastreamer_publish_operations_total": Metric(
        "counter",
        "Operations that a remote publisher committed: appended, or already in the stream.",
        labels=("outcome",),
    ),
    "datastreamer_publish_entries_total": Metric("counter", "Entries of the appended operations."),
    "datastreamer_publish_bytes_total": Metric(
        "counter", "Bytes of these entries, entry heads included."
    ),
    "datastreamer_cold_reads_total": Metric(
        "counter", "Spans that were not in the page cache and were read ahead of sending."
    ),
    "datastreamer_damaged_pages": Metric(
        "gauge", "Pages that did not match their checksums when they were last compared.", "max"
    ),
    "datastreamer_healed_pages_total": Metric(
        "counter", "Damaged pages that were restored from other servers or archives."
    ),
    "datastreamer_scrub_pages_total": Metric(
        "counter",
        "Pages that the scrub examined, by result; unverified: a page without a checksum.",
        labels=("result",),
    ),
    "datastreamer_scrub_bytes_total": Metric("counter", "Bytes that the scrub read."),
    "datastreamer_scrub_age_seconds": Metric(
        "gauge", "Time since the scrub last ended a full pass, or since it began its first.", "max"
    ),
    # A relay's upstreams.
    "datastreamer_relay_lag_entries": Metric(
        "gauge",
        "Entries that an upstream was last known to hold and the relay lacks.",
        "max",
        ("upstream",),
    ),
    "datastreamer_relay_upstream_state": Metric(
        "gauge", "1 for the upstream's current state, else 0.", "max", ("upstream", "state")
    ),
    "datastreamer_relay_updates_total": Metric(
        "counter", "Entries of a relay that were replaced because its upstream updated them."
    ),
    "datastreamer_relay_uncompared_entries": Metric(
        "gauge", "Entries of a relay whose hashes were not yet compared with the upstream's.", "max"
    ),
    "datastreamer_relay_damaged_total": Metric(
        "counter",
        "Operations received from an upstream that did not match its checksums and were rejected.",
        labels=("upstream",),
    ),
    # Reassembly of payloads from several sources.
    "datastreamer_reassembly_in_flight": Metric(
        "gauge", "Incomplete payloads, and prefixes that no header has announced."
    ),
    "datastreamer_reassembly_messages": Metric("gauge", "Messages of these payloads and prefixes."),
    "datastreamer_reassembly_message_bytes": Metric("gauge", "Bytes of these messages."),
    "datastreamer_reassembly_used_bytes": Metric(
        "gauge", "Bytes counted against the budget, the records of delivered payloads included."
    ),
    "datastreamer_reassembly_oldest_seconds": Metric(
        "gauge", "Age of the oldest incomplete payload, from its first message."
    ),
    "datastreamer_reassembly_payloads_total": Metric("counter", "Payloads completed."),
    "datastreamer_reassembly_dropped_total": Metric(
        "counter", "Payloads and prefixes dropped because of their age or the budget."
    ),
    "datastreamer_reassembly_received_total": Metric(
        "counter", "Messages received, by source.", labels=("source",)
    ),
    "datastreamer_reassembly_duplicates_total": Metric(
        "counter", "Received messages that were duplicates, by source.", labels=("source",)
    ),
    "datastreamer_reassembly_outside_total": Metric(
        "counter", "Received messages outside of the subscription, by source.", labels=("source",)
    ),
    "datastreamer_reassembly_malformed_total": Metric(
        "counter", "Received messages that could not be parsed, by source.", labels=("source",)
    ),
    "datastreamer_reassembly_conflicts_total": Metric(
        "counter",
        "Messages that contradict earlier ones, by source; the source is empty if the message "
        "had waited for a header.",
        labels=("source",),
    ),
    "datastreamer_reassembly_seconds": Metric(
        "histogram",
        "Time from a payload's first message to its last, by the source of the last.",
        labels=("source",),
        bounds=(0.001, 0.005, 0.025, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0, 600.0),
    ),
    "datastreamer_reassembly_source_state": Metric(
        "gauge", "1 for the source's current state, else 0.", "max", ("source", "state")
    ),
    "datastreamer_reassembly_source_losses_total": Metric(
        "counter", "Times that the connection to a source was lost or failed.", labels=("source",)
    ),
    # The serving process, under Prometheus's usual names.
    "process_cpu_seconds_total": Metric("counter", "User and system CPU time."),
    "process_resident_memory_bytes": Metric("gauge", "Resident memory."),
    "process_virtual_memory_bytes": Metric("gauge", "Virtual memory."),
    "process_open_fds": Metric("gauge", "Open file descriptors."),
    "process_max_fds": Metric("gauge", "Maximum number of open file descriptors.", "max"),
    "process_start_time_seconds": Metric("gauge", "Start time as Unix time.", "min"),
}
