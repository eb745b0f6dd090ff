"""Every metric: name, kind, labels, and what becomes of the samples of several processes.

Owns the names, which dashboards and alerts rely on; units are Prometheus's, seconds and bytes.
A test holds the documentation to this table.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

Kind = Literal["counter", "gauge", "histogram", "gaugehistogram"]
Together = Literal["sum", "max", "min"]


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric. `together`: what the samples of several processes with the same labels come
    to; those that all processes see alike are not added up. `bounds`: a histogram's."""

    kind: Kind
    help: str
    labels: tuple[str, ...] = ()
    together: Together = "sum"
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
        "gauge", "Always 1; the labels say what runs.", ("version", "python"), "max"
    ),
    # The stream.
    "datastreamer_head_entries": Metric(
        "gauge", "Entries that clients can see: the number of the next one.", (), "max"
    ),
    "datastreamer_head_bytes": Metric(
        "gauge", "Bytes of the stream up to the head, header and padding included.", (), "max"
    ),
    "datastreamer_file_replaced": Metric(
        "gauge",
        "1 while the stream's path leads to no file, or another than the one that is open.",
        (),
        "max",
    ),
    "datastreamer_index_lag_bytes": Metric(
        "gauge", "Bytes of entries whose bookmarks are not in the index yet.", (), "max"
    ),
    "datastreamer_index_lag_entries": Metric(
        "gauge", "Entries between the index and the head.", (), "max"
    ),
    "datastreamer_index_on_disk": Metric(
        "gauge",
        "1: the bookmark index is on disk; 0: it is in memory, or look-ups read the stream.",
        (),
        "min",
    ),
    # The writer; all who serve its file read the same numbers.
    "datastreamer_committed_operations_total": Metric(
        "counter", "Atomic operations committed since the writer opened the stream.", (), "max"
    ),
    "datastreamer_committed_entries_total": Metric("counter", "Entries of these.", (), "max"),
    "datastreamer_committed_bytes_total": Metric(
        "counter", "Bytes of the file that these took, padding included.", (), "max"
    ),
    "datastreamer_commit_failures_total": Metric(
        "counter",
        "Writes and syncs that the system refused; a full disk, for one.",
        (),
        "max",
    ),
    "datastreamer_commit_seconds": Metric(
        "histogram",
        "How long commits took: hashes, writes and, where it is waited for, the sync.",
        (),
        "max",
        _SECONDS,
    ),
    "datastreamer_sync_seconds": Metric(
        "histogram",
        "How long syncs to disk took, those in the background too.",
        (),
        "max",
        _SECONDS,
    ),
    # Clients that are connected now.
    "datastreamer_clients": Metric("gauge", "Clients connected, by state.", ("state",)),
    "datastreamer_clients_limit": Metric("gauge", "Clients that are let in at most."),
    "datastreamer_reserved_clients": Metric(
        "gauge", "Clients beyond that limit, in places reserved for known clients."
    ),
    "datastreamer_reserved_clients_limit": Metric("gauge", "Places reserved for known clients."),
    "datastreamer_provisional_clients": Metric(
        "gauge", "Connections without a place that may still prove who they are."
    ),
    "datastreamer_clients_lag_entries": Metric(
        "gaugehistogram",
        "Streaming clients by how many entries they are behind the head.",
        bounds=(0.0, *_ENTRIES),
    ),
    "datastreamer_clients_lag_bytes": Metric(
        "gaugehistogram",
        "Streaming clients by how many bytes of the file they are behind the head.",
        bounds=(0.0, *_BYTES),
    ),
    "datastreamer_client_lag_entries": Metric(
        "gauge", "Entries that a client is behind: the clients furthest behind.", ("client",)
    ),
    "datastreamer_client_lag_bytes": Metric(
        "gauge", "Bytes that a client is behind: the clients furthest behind.", ("client",)
    ),
    # Since the server started.
    "datastreamer_connections_accepted_total": Metric("counter", "Connections that got a place."),
    "datastreamer_connections_refused_total": Metric(
        "counter", "Connections that got no place, by the limit that they ran into.", ("reason",)
    ),
    "datastreamer_authentication_failures_total": Metric(
        "counter",
        "Tokens and certificates that were not accepted, by the command that showed them.",
        ("command",),
    ),
    "datastreamer_connections_ended_total": Metric(
        "counter", "Connections that are over, by why.", ("reason",)
    ),
    "datastreamer_commands_total": Metric("counter", "Commands taken, by kind.", ("command",)),
    "datastreamer_errors_total": Metric("counter", "Refusals and failures, by kind.", ("kind",)),
    "datastreamer_sent_bytes_total": Metric(
        "counter", "Bytes of entries, answers and Results that the system took for clients."
    ),
    "datastreamer_sent_entries_total": Metric(
        "counter", "Entries sent whole: streamed, or in batches and ranges."
    ),
    "datastreamer_batch_read_request_seconds": Metric(
        "histogram",
        "How long requests of batches took until they were answered, the wait for a commit left "
        "out (BookKeeper: BATCH_READ_ENTRY_REQUEST).",
        bounds=(0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 3.0),
    ),
    "datastreamer_batch_read_response_bytes": Metric(
        "histogram",
        "Bytes of entries in answers to requests of batches (BookKeeper: "
        "BATCH_READ_ENTRY_RESPONSE_SIZE).",
        bounds=(128.0, 512.0, 1024.0, 2048.0, 4096.0, 16384.0, 131072.0, 1048576.0),
    ),
    "datastreamer_filter_scanned_bytes_total": Metric(
        "counter", "Bytes of the file looked through for clients that want some types alone."
    ),
    "datastreamer_range_hash_seconds_total": Metric(
        "counter",
        "Time that requests for hashes of ranges of entries took, the wait for each other "
        "included.",
    ),
    "datastreamer_publish_sources": Metric("gauge", "Sources elsewhere that hold the lease."),
    "datastreamer_publish_epoch": Metric("gauge", "The epoch of the last lease.", (), "max"),
    "datastreamer_publish_operations_total": Metric(
        "counter",
        "Operations that a source elsewhere committed: appended, or found to be there already.",
        ("outcome",),
    ),
    "datastreamer_publish_entries_total": Metric("counter", "Entries of those appended."),
    "datastreamer_publish_bytes_total": Metric("counter", "Bytes of these, heads included."),
    "datastreamer_cold_reads_total": Metric(
        "counter", "Spans that were not in memory and were read before they were sent."
    ),
    # A relay's upstreams.
    "datastreamer_relay_lag_entries": Metric(
        "gauge",
        "Entries that an upstream was last known to hold and the relay does not.",
        ("upstream",),
        "max",
    ),
    "datastreamer_relay_upstream_state": Metric(
        "gauge",
        "1 for the state that an upstream is in, else 0.",
        ("upstream", "state"),
        "max",
    ),
    "datastreamer_relay_updates_total": Metric(
        "counter", "Entries of a relay that were replaced because its upstream updated them."
    ),
    "datastreamer_relay_uncompared_entries": Metric(
        "gauge",
        "Entries of a relay that are still to be compared with its upstream's by hashes.",
        (),
        "max",
    ),
    # Payloads made whole from several sources.
    "datastreamer_reassembly_in_flight": Metric(
        "gauge", "Payloads that are not whole yet, and prefixes that nobody has announced."
    ),
    "datastreamer_reassembly_messages": Metric("gauge", "Messages of these."),
    "datastreamer_reassembly_message_bytes": Metric("gauge", "Bytes of these messages."),
    "datastreamer_reassembly_used_bytes": Metric(
        "gauge", "Bytes charged against the budget, with what is known of payloads given out."
    ),
    "datastreamer_reassembly_oldest_seconds": Metric(
        "gauge", "How long ago the first message came of the oldest that is not whole."
    ),
    "datastreamer_reassembly_payloads_total": Metric("counter", "Payloads made whole."),
    "datastreamer_reassembly_dropped_total": Metric(
        "counter", "Payloads and prefixes that were given up, for their age or for the budget."
    ),
    "datastreamer_reassembly_received_total": Metric(
        "counter", "Messages that came from a source.", ("source",)
    ),
    "datastreamer_reassembly_duplicates_total": Metric(
        "counter", "Messages of these that were there already.", ("source",)
    ),
    "datastreamer_reassembly_outside_total": Metric(
        "counter", "Messages of these that nobody subscribes to.", ("source",)
    ),
    "datastreamer_reassembly_malformed_total": Metric(
        "counter", "Messages of these that nothing could be made of.", ("source",)
    ),
    "datastreamer_reassembly_conflicts_total": Metric(
        "counter",
        "Messages that contradicted what had come before; without a source where they had "
        "waited for a header.",
        ("source",),
    ),
    "datastreamer_reassembly_seconds": Metric(
        "histogram",
        "From a payload's first message to its last, by the source of the last.",
        ("source",),
        bounds=(0.001, 0.005, 0.025, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0, 600.0),
    ),
    "datastreamer_reassembly_source_state": Metric(
        "gauge", "1 for the state that a source is in, else 0.", ("source", "state"), "max"
    ),
    "datastreamer_reassembly_source_losses_total": Metric(
        "counter", "Times that a source was lost, or failed, since it was read.", ("source",)
    ),
    # The serving process, under the names that every exporter has.
    "process_cpu_seconds_total": Metric("counter", "Processor time, user and system."),
    "process_resident_memory_bytes": Metric("gauge", "Memory in use."),
    "process_virtual_memory_bytes": Metric("gauge", "Address space in use."),
    "process_open_fds": Metric("gauge", "Descriptors open."),
    "process_max_fds": Metric("gauge", "Descriptors that may be open.", (), "max"),
    "process_start_time_seconds": Metric("gauge", "When it started, Unix time.", (), "min"),
}
