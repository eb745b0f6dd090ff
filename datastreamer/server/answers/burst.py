"""Answers to different clients that are sent together.

Owns when. An answer wakes its client, and to wake an idle process takes as long as to answer some
queries: sent one after the other, without other work in between, the answers that follow find it
awake (64 connections of one program, each waiting for its answer: 53 k/s instead of 40 k/s).
"""

from __future__ import annotations

import contextlib

import trio

from datastreamer.server.streaming.output import ClientOutput

# Answers that are sent together. The first of them waits until the last is read.
_MOST = 16


class _Due:
    """One client's answers."""

    __slots__ = ("data", "error", "output", "sent")

    def __init__(self, output: ClientOutput, data: bytes) -> None:
        self.output = output
        self.data = data
        # Bytes of them that were sent; -1: it was not tried yet.
        self.sent = -1
        self.error: Exception | None = None


class AnswerBurst(trio.abc.Instrument):
    """The answers of one server's clients, sent before the event loop looks for events."""

    def __init__(self) -> None:
        self._due: list[_Due] = []
        self._instrumenting = False

    async def send(self, output: ClientOutput, data: bytes) -> None:
        """As `ClientOutput.send`; always lets other tasks run."""
        due = _Due(output, data)
        self._due.append(due)
        if not self._instrumenting:
            self._instrumenting = True
            trio.lowlevel.add_instrument(self)
        if len(self._due) >= _MOST:
            self._send_all()
        await trio.lowlevel.checkpoint()
        if due.error is not None:
            raise due.error
        if due.sent < 0:
            # The event loop does without an instrument that failed once.
            self._due.remove(due)
            due.sent = 0
        if due.sent < len(data):
            await output.send(memoryview(data)[due.sent :])

    def before_io_wait(self, timeout: float) -> None:
        """The event loop looks for events."""
        if self._due:
            self._send_all()

    def close(self) -> None:
        """For the event loop that called `send`."""
        if self._instrumenting:
            self._instrumenting = False
            with contextlib.suppress(KeyError):
                trio.lowlevel.remove_instrument(self)

    def _send_all(self) -> None:
        all_due, self._due = self._due, []
        for due in all_due:
            try:
                due.sent = due.output.send_now(due.data)
            except Exception as error:  # noqa: BLE001 - the client's task raises it
                due.error = error
