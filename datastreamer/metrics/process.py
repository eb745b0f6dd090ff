"""The process's use of memory, CPU and descriptors, as prometheus-client collects it.

On Linux only; elsewhere there are no samples.
"""

from __future__ import annotations

from datastreamer.metrics.exposition import Samples


def process_samples() -> Samples:
    """Raises `ImportError` if prometheus-client is not installed."""
    from prometheus_client import ProcessCollector

    return {
        sample.name: [([], sample.value)]
        for family in ProcessCollector(registry=None).collect()
        for sample in family.samples
    }
