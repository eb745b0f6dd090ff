"""Reassembly fed from servers and files, and the stores of its progress."""
