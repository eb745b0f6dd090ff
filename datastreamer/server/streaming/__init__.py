"""Entries sent to streaming clients: broadcast, catch-up, filters."""
