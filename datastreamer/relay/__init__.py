"""Relays: a copy of another server's stream, kept up to date and served."""
