"""The messages for programs that want protobuf's own classes: `datastream_pb2`.

Made by protoc from `datastream.proto`, and made again by ``make proto``. Nothing here imports
it; who does needs protobuf, which the extra ``protobuf`` brings.
"""
