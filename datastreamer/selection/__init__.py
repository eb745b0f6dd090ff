"""Which entries a reader wants."""
