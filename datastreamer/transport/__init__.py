"""Listeners, endpoints, TLS and the byte streams of both sides."""
