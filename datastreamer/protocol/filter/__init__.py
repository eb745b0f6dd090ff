"""Reads of selected entries: messages, exchanges, history."""
