"""The messages as protobuf's own classes, `datastream_pb2`, which ``make proto`` generates.

This package does not import them; a program that does needs the extra ``protobuf``.
"""
