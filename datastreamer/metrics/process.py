"""What this process uses of the machine, under the names that every exporter has.

prometheus-client finds it out, on Linux; elsewhere there is nothing to tell.
"""

from __future__ import annotations

from datastreamer.metrics.exposition import Samples


def process_samples() -> Samples:
    """Raises `ImportError` where prometheus-client is not installed."""
    from prometheus_client import ProcessCollector

    return {
        sample.name: [([], sample.value)]
        for family in ProcessCollector(registry=None).collect()
        for sample in family.samples
    }
