"""Checks that a zkEVM stream is consistent."""
