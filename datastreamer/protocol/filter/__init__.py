"""Reads of entries of some types: messages, flows, history."""
