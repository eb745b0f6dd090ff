"""HTTP: the stream for browsers, curl and every language, and the monitoring paths."""
