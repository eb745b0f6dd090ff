"""Whether the path of the served stream still leads to the open file, and which stream replaced it.

Owns the checks, their log lines, and the opening of the stream that replaced a followed one.
`server.py` ends the clients.
"""

from __future__ import annotations

import logging
from typing import Final

import trio

from datastreamer.errors import DatastreamerError
from datastreamer.printable import counted
from datastreamer.server.ticks import TICK_SECONDS, until_tick
from datastreamer.storage.stream import DataStream

_log = logging.getLogger(__name__)

_LOOK_SECONDS: Final = TICK_SECONDS
_OPEN_SECONDS: Final = 0.5
"""Interval of the attempts to open what is at the path."""
_REMIND_SECONDS: Final = 60.0


class FileWatch:
    """Checks the path of `stream`. `logs` is false if another process logs it."""

    def __init__(self, stream: DataStream, *, logs: bool = True) -> None:
        self.stream = stream
        self.lost = ""
        """Why the path does not lead to the open file; empty while it does."""
        self._logs = logs

    async def until_lost(self) -> None:
        """Return when the path does not lead to the open file any more."""
        while not self.look():
            await until_tick(_LOOK_SECONDS)

    async def report(self) -> None:
        """For a stream that is served whatever its path leads to: log when the path leads
        elsewhere, again every minute, and when it leads to the file again; forever."""
        while True:
            await self.until_lost()
            due = trio.current_time()
            while self.look():
                if trio.current_time() >= due:
                    due += _REMIND_SECONDS
                    self._say(
                        logging.ERROR,
                        f"{self.lost}; its {self.stream.total_entries} entries are served from "
                        "the open file, and no entry is appended; to save them, "
                        f"{self.stream.way_to_save} before this process ends",
                    )
                await until_tick(_LOOK_SECONDS)
            self._say(logging.WARNING, "the path leads to the open file again")

    def say_lost(self) -> None:
        """Log that the clients are disconnected for it."""
        self._say(logging.ERROR, f"{self.lost}; its clients are disconnected")

    async def successor(self) -> DataStream | None:
        """Open the stream at the path as soon as there is one of the same type; None if the path
        leads to the open file again."""
        due, last = trio.current_time(), ""
        while self.look():
            try:
                found = await trio.to_thread.run_sync(self._open)
            except (DatastreamerError, OSError) as error:
                now = trio.current_time()
                kind = type(error).__name__
                if now >= due or kind != last:
                    due, last = now + _REMIND_SECONDS, kind
                    self._say(logging.WARNING, f"waiting for a stream at this path: {error}")
                await trio.sleep(_OPEN_SECONDS)
                continue
            if not self.look():
                found.close()  # the same file, back since the last look
                break
            self._say(
                logging.WARNING,
                f"now serving the stream at this path ({counted(found.total_entries)})",
            )
            return found
        self._say(logging.WARNING, "the path leads to the open file again; serving it")
        return None

    def adopt(self, stream: DataStream) -> None:
        """Check the path of `stream` from now on."""
        self.stream, self.lost = stream, ""

    def look(self) -> str:
        """Check now; returns `lost`."""
        self.lost = self.stream.replaced
        return self.lost

    def _open(self) -> DataStream:
        stream = self.stream
        return DataStream.open(
            stream.absolute_path,
            stream_type=stream.header.stream_type,
            follow=True,
            index=stream.index_name,
            verify="never",  # the server compares what it reads from the disk
        )

    def _say(self, level: int, what: str) -> None:
        if self._logs:
            _log.log(level, "%s: %s", self.stream.path, what)
