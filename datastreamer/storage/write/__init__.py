"""Writing a stream file."""
