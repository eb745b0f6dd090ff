"""What the paths of an HTTP port answer."""
