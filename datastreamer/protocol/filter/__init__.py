"""Reads of entries of some types: messages, exchanges, history."""
