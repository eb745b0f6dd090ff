"""A stream's pages in object storage: segments, manifests, and the store that holds them."""

from typing import Final

LEVEL: Final = 3
"""Of zstd."""
TIMEOUT: Final = 30.0
"""Seconds for a request with its retries."""
CACHE_BYTES: Final = 1 << 30
"""Of fetched pages that a server keeps."""
