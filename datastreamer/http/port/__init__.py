"""One HTTP port: connections, limits, which requests are answered."""
