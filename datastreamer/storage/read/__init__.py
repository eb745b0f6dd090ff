"""Reading a stream file."""
