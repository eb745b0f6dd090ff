"""The fixtures of a stream that a thread serves."""

from tests.server.streaming.live_thread import follower, only_the_thread, waker, writer

__all__ = ["follower", "only_the_thread", "waker", "writer"]
