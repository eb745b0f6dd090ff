"""Makes text from outside safe to show in a terminal or a log.

Peers, files and names may contain control characters, escape sequences, characters that reverse or
hide text, lone surrogates and line breaks. They are shown as Python escapes them (``\\x1b``,
``\\u202e``).
"""

from __future__ import annotations

import json
import re
from typing import Any, Final, TextIO

LONGEST_LINE: Final = 4000
"""Maximum length of a message in characters; a longer one loses its middle."""

# Printable by their Unicode class, but invisible: fillers, selectors, blanks.
_INVISIBLE = re.compile(
    "[\\u034f\\u115f\\u1160\\u17b4\\u17b5\\u180b-\\u180f\\u2800\\u3164\\ufe00-\\ufe0f\\uffa0"
    "\\U000e0100-\\U000e01ef]"
)
_SHORT = {"\n": "\\n", "\r": "\\r", "\t": "\\t"}
_PLAIN_BYTES = b"\n" + bytes(range(0x20, 0x7F))


def printable(text: str) -> str:
    """`text` with everything escaped except printable characters and line feeds."""
    if text.replace("\n", "").isprintable() and not _INVISIBLE.search(text):
        return text
    return "".join([char if char == "\n" else _shown(char) for char in text])


def one_line(text: str, longest: int | None = LONGEST_LINE) -> str:
    """`text` as one printable line of bounded length; line feeds are escaped too."""
    return printable(cut(text, longest)).replace("\n", "\\n")


def cut(text: str, longest: int | None = LONGEST_LINE) -> str:
    """`text` without its middle if it is longer than `longest`."""
    if longest is None or len(text) <= longest:
        return text
    first, last = longest * 3 // 4, longest // 4
    left_out = len(text) - first - last
    return f"{text[:first]} ... ({left_out:,} more characters) ... {text[-last:]}"


def counted(number: int, what: str = "entry", style: str = "") -> str:
    """A number with its noun; `style` is that of `format`."""
    several = f"{what[:-1]}ies" if what.endswith("y") else f"{what}s"
    return f"{number:{style}} {what if number == 1 else several}"


def printable_bytes(data: bytes, encoding: str) -> bytes:
    """Like `printable`, for encoded text."""
    if not data.translate(None, _PLAIN_BYTES):
        return data
    return printable(data.decode(encoding, "surrogateescape")).encode(encoding, "backslashreplace")


def json_text(value: Any) -> str:
    """`value` as a line of JSON, with everything escaped except printable ASCII."""
    return json.dumps(value, default=str).replace("\x7f", "\\u007f")


def _shown(char: str) -> str:
    if char.isprintable() and not _INVISIBLE.match(char):
        return char
    code = ord(char)
    if code < 0x100:
        return _SHORT.get(char, f"\\x{code:02x}")
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


class PrintableStream:
    """A text stream that writes printable text to `below`. Its `buffer` accepts any bytes."""

    def __init__(self, below: TextIO) -> None:
        self.below = below

    def write(self, text: str) -> int:
        self.below.write(printable(text))
        return len(text)

    def writelines(self, lines: list[str]) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.below, name)


def below(stream: Any) -> Any:
    """The stream that a `PrintableStream` writes to; any other stream itself."""
    while isinstance(stream, PrintableStream):
        stream = stream.below
    return stream
