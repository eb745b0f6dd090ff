"""Tables of a stream: ingestion and queries."""
