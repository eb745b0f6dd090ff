"""Clients of a server: the exchanges, their drivers, iteration and queries."""
