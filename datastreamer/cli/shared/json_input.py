"""JSON lines on standard input, for the commands that write a stream.

Owns how lines are read, which errors end the command, and how results are printed; what a line
means belongs to each command.
"""

from __future__ import annotations

import codecs
import json
import sys
from collections.abc import Callable
from typing import Any

from datastreamer.cli import early_signals
from datastreamer.cli.shared.exit_codes import Failure, WorkInterrupted, signal_of, write_out
from datastreamer.cli.shared.output import json_line
from datastreamer.errors import CommitInDoubt, UsageError, WriteFailed
from datastreamer.printable import counted


class BadLine(Exception):
    """A line that the command does not accept; ``str()`` says why."""


class InputLines:
    """The lines of standard input, as values; `number` is that of the current line."""

    def __init__(self, what: str, limit: int) -> None:
        """Lines are shorter than `limit` bytes. Raises `Failure` if standard input is closed:
        `what` names the expected input."""
        if sys.stdin is None or sys.stdin.closed:
            raise Failure(f"standard input is closed; the command reads {what} from it, as JSON")
        self.number = 0
        self._limit = limit
        self._input = sys.stdin.buffer
        self._output_open = True

    def process(self, apply: Callable[[Any], None], outcome: Callable[[], str]) -> None:
        """Call `apply` with the value of each line that is not blank, up to the end of the input.

        Raises `Failure` at the first line that is wrong or cannot be written, and when a signal
        arrives; `outcome` then cleans up and says what the stream holds.
        """
        try:
            while line := self._read():
                self.number += 1
                value = self._value_of(line)
                if value is not None or line.strip():
                    apply(value)
        except KeyboardInterrupt as error:
            number = signal_of(error)
            text = f"{early_signals.reason(number)} after line {self.number}; {outcome()}"
            raise WorkInterrupted(text, number) from None
        except (BadLine, UsageError) as error:
            raise Failure(f"line {self.number}: {error}; {outcome()}") from None
        except WriteFailed as error:
            # An error that leaves the operation in doubt says itself what to do.
            rest = "" if isinstance(error, CommitInDoubt) else f"; {outcome()}"
            raise Failure(f"line {self.number}: {error}{rest}") from error

    def acknowledge(self, result: dict[str, Any]) -> None:
        """Print the result of a line: its operation is durable.

        If the reader of the output has closed it, later operations are still written.
        """
        if not self._output_open:
            return
        try:
            write_out(json_line(result))
        except BrokenPipeError:
            self._output_open = False
        except OSError as error:
            raise Failure(
                f"{error.filename}: {error.strerror}; line {self.number} is done: the operation "
                f"from entry {result['first_entry']} on is in the stream, which holds "
                f"{counted(result['total_entries'])}"
            ) from error

    def _read(self) -> bytes:
        try:
            return self._input.readline(self._limit)
        except OSError as error:
            raise Failure(f"standard input: {error.strerror or error}") from error

    def _value_of(self, line: bytes) -> Any:
        if len(line) >= self._limit:
            raise BadLine(f"it is longer than {self._limit} bytes")
        try:
            # As json.loads does it, without its search for encodings.
            return _decode(line.decode())
        except ValueError as error:
            if not line.strip():
                return None
            if not isinstance(error, UnicodeDecodeError | json.JSONDecodeError):
                # Python does not convert numbers of several thousand digits.
                raise BadLine("it has a number with too many digits") from None
            if line.startswith(codecs.BOM_UTF8):
                raise BadLine("it begins with a byte order mark, which is not JSON") from None
            raise BadLine(f"it is not JSON ({error})") from None
        except RecursionError:
            raise BadLine("it is nested too deep") from None


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Raises `BadLine` if a key occurs twice: JSON parsers would drop one of its values."""
    found = dict(pairs)
    if len(found) != len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise BadLine(f"the key {shown(twice)} occurs twice")
    return found


_decode = json.JSONDecoder(object_pairs_hook=_object).decode


def bytes_of(text: object) -> bytes:
    """The bytes of "0x.."."""
    if isinstance(text, str) and text[:2] == "0x":
        try:
            found = bytes.fromhex(text[2:])
        except ValueError:
            pass
        else:
            if 2 * len(found) == len(text) - 2:  # fromhex accepts blanks
                return found
    raise BadLine(f"{shown(text)} is not hex: 0x and two digits per byte")


def shown(value: Any) -> str:
    """A value as JSON, shortened for an error message."""
    try:
        text = json.dumps(value)
    except RecursionError:
        return "a deeply nested value"
    return text if len(text) <= 60 else f"{text[:57]}..."
