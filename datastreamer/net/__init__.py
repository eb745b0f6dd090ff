"""Sockets and tasks: the only package that imports trio."""
