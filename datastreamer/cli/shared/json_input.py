"""JSON lines from standard input, as commands that write a stream take them.

Owns how they are read and what is wrong with one; what they mean is each command's.
"""

from __future__ import annotations

import codecs
import functools
import json
import os
import select
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Any, BinaryIO

from datastreamer.cli.shared.exit_codes import Failure


class BadLine(Exception):
    """A line that is none of ours; ``str()`` says why."""


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object. Raises `BadLine` where a key stands in it twice: one of the two would be lost."""
    found = dict(pairs)
    if len(found) != len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise BadLine(f"{shown(twice)} stands there twice")
    return found


_decode = json.JSONDecoder(object_pairs_hook=_once).decode


def standard_input(what: str, most: int) -> Callable[[], bytes]:
    """Reads a line, or `most` bytes of it: as much of it as is still good for an error.

    `what` says what comes there, for who has closed it.
    """
    if sys.stdin is None or sys.stdin.closed:
        raise Failure(f"standard input is closed; {what} come there as JSON lines")
    source = sys.stdin.buffer
    # A pipe may be set not to block by whoever shares it: then nothing is no end.
    blocks = True
    with suppress(AttributeError, OSError):
        blocks = os.get_blocking(source.fileno())
    read = functools.partial(source.readline, most)

    def read_line() -> bytes:
        try:
            return read() if blocks else _waited_for(source, most)
        except OSError as error:
            raise Failure(f"standard input: {error.strerror or error}") from error

    return read_line


def _waited_for(source: BinaryIO, most: int) -> bytes:
    """A line of a pipe that does not block."""
    line = b""
    while not line.endswith(b"\n") and len(line) < most:
        # A byte that is asked for is there, or is waited for, or never comes.
        byte = source.read(1)
        if byte is None:
            select.select([source], [], [])
        elif byte:
            line += byte
        else:
            break
    return line


def value_of(line: bytes, most: int, why: str) -> Any:
    """What a line says; None for an empty one. `why` is what a line that is too long exceeds."""
    if len(line) >= most:
        raise BadLine(f"it is longer than {most} bytes, {why}")
    try:
        # As json.loads does it, but for the search for encodings.
        return _decode(line.decode())
    except ValueError as error:
        if not line.strip():
            return None
        if not isinstance(error, UnicodeDecodeError | json.JSONDecodeError):
            # Python reads no number of more than some thousand digits.
            raise BadLine("it has a number too long for any of ours") from None
        if line.startswith(codecs.BOM_UTF8):
            raise BadLine("it begins with a byte order mark, which JSON has none of") from None
        raise BadLine(f"it is no JSON ({error})") from None
    except RecursionError:
        raise BadLine("it is nested too deep for any of ours") from None


def bytes_of(text: object) -> bytes:
    """The bytes of "0x.."."""
    if isinstance(text, str) and text[:2] == "0x":
        try:
            found = bytes.fromhex(text[2:])
        except ValueError:
            pass
        else:
            if 2 * len(found) == len(text) - 2:  # fromhex overlooks blanks
                return found
    raise BadLine(f"{shown(text)} is no hex: 0x, then two digits a byte")


def shown(what: Any) -> str:
    """As much of a value as a message has room for."""
    try:
        text = json.dumps(what)
    except RecursionError:
        return "something nested deep"
    return text if len(text) <= 60 else f"{text[:57]}..."
