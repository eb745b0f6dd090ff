"""The fixtures of tests with servers and clients."""

from __future__ import annotations

from tests.network.fixtures import authority, network, no_leaks, path, secured, stream
from tests.relay.relaying import no_times

__all__ = ["authority", "network", "no_leaks", "no_times", "path", "secured", "stream"]
