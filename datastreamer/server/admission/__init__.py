"""Which connections a server accepts, and what clients prove."""
