"""Bookmark indexes: key to entry number, behind one interface."""
