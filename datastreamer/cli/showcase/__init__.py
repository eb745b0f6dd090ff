"""``python -m datastreamer.cli.showcase``: what a stream server is for, seen in 20 seconds."""
