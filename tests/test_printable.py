"""Text from outside, as it may be shown."""

from __future__ import annotations

import ast
import io
import json
import logging
import sys
import unicodedata
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from datastreamer.printable import (
    LONGEST_LINE,
    PrintableStream,
    json_text,
    one_line,
    printable,
    printable_bytes,
)
from datastreamer.service.log import StderrLog, _Plain

ANY = st.text(st.characters(exclude_categories=[]))


@given(ANY)
def test_nothing_is_left_that_acts(text: str) -> None:
    shown = printable(text)
    assert not {unicodedata.category(char) for char in shown if char != "\n"} & {
        *("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp")
    }
    assert printable(shown) == shown
    assert shown.count("\n") == text.count("\n")
    assert one_line(text, None) == shown.replace("\n", "\\n")
    shown.encode()


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain, käse, 漢字, 🙂", "plain, käse, 漢字, 🙂"),
        ("\x1b[31m", "\\x1b[31m"),
        ("\x9b6n\x7f\x00", "\\x9b6n\\x7f\\x00"),
        ("\u202eabc\u2066", "\\u202eabc\\u2066"),
        ("a\u200bb\u2060c\ufeff\u00ad", "a\\u200bb\\u2060c\\ufeff\\xad"),
        ("\ufe0f\u3164\u2800\u034f\U000e0101", "\\ufe0f\\u3164\\u2800\\u034f\\U000e0101"),
        ("\udcff\ud800", "\\udcff\\ud800"),
        ("\r\t\v\u2028\u0085", "\\r\\t\\x0b\\u2028\\x85"),
        ("one\ntwo", "one\ntwo"),
    ],
)
def test_what_is_shown(text: str, shown: str) -> None:
    assert printable(text) == shown


def test_a_line_is_one_line_of_bounded_length() -> None:
    assert one_line("one\ntwo") == "one\\ntwo"
    assert one_line("x" * LONGEST_LINE) == "x" * LONGEST_LINE
    cut = one_line("begin" + "x" * 10**6 + "end")
    assert len(cut) < LONGEST_LINE + 50
    assert cut.startswith("begin")
    assert cut.endswith("end")
    assert "(996,008 more characters)" in cut


@given(ANY)
def test_bytes_as_text(text: str) -> None:
    data = text.encode("utf-8", "replace")
    assert printable_bytes(data, "utf-8").decode() == printable(data.decode())
    assert printable_bytes(b"\xff\x1b", "utf-8") == b"\\udcff\\x1b"
    assert printable_bytes("é\x9b".encode("latin-1"), "latin-1") == b"\xe9\\x9b"


@given(st.recursive(ANY, lambda each: st.lists(each) | st.dictionaries(ANY, each)))
def test_json(value: object) -> None:
    text = json_text(value)
    assert all(" " <= char <= "~" for char in text)
    assert json.loads(text) == value


def test_a_stream(capsys: pytest.CaptureFixture[str]) -> None:
    below = io.StringIO()
    stream = PrintableStream(below)
    assert stream.write("a\x1b\n") == 3
    print("b\x1b", file=stream)  # type: ignore[call-overload]
    stream.writelines(["c\x1b"])
    assert below.getvalue() == "a\\x1b\nb\\x1b\nc\\x1b"
    assert not stream.isatty()


@pytest.mark.parametrize("style", ["text", "json", "the application's"])
def test_records_of_the_log(style: str) -> None:
    """What is quoted adds no line, and no line of a traceback looks like one of the log."""
    message = "hostile\x1b]0;x\x07\n2026-01-01 00:00:00.000 error forged"
    try:
        raise ValueError(message)
    except ValueError:
        record = logging.LogRecord(
            "n", logging.INFO, "f", 1, "failed: %s", (message,), sys.exc_info()
        )
    if style == "the application's":
        lines = _Plain("%(levelname)s: %(message)s").format(record).splitlines()
    else:
        handler = StderrLog()
        handler.style = style  # type: ignore[assignment]
        lines = handler.format(record).splitlines()
    if style == "json":
        (line,) = lines
        assert json.loads(line)["message"].startswith(f"failed: {message}\nTraceback")
        assert line.isprintable()
        return
    first, *trace = lines
    assert "failed: hostile\\x1b]0;x\\x07\\n2026" in first
    assert trace
    assert all(line.startswith("    ") and line.isprintable() for line in trace)


# The modules that write.

CLI = Path(__file__).resolve().parent.parent / "datastreamer" / "cli"
# They own standard output and standard error, or run before these are set up.
OWNERS = {"early_signals.py", "shared/console.py", "shared/exit_codes.py", "shared/logs.py"}
# `--format raw` writes bytes, and shells read scripts and completions with their tabs.
RAW = {"main.py", "shared/output.py", "verbs/cat.py", "verbs/completion.py", "verbs/info.py"}


@pytest.mark.parametrize("path", sorted(CLI.rglob("*.py")), ids=lambda it: str(it.relative_to(CLI)))
def test_commands_write_by_the_one_way_alone(path: Path) -> None:
    if path.relative_to(CLI).as_posix() in OWNERS:
        return
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            names = {alias.name for alias in node.names}
            assert not (node.module == "rich.console" and "Console" in names), path
            assert "write_raw" not in names or path.relative_to(CLI).as_posix() in RAW, path
        if not isinstance(node, ast.Call):
            continue
        called = ast.unparse(node.func)
        assert not re_writes(called), f"{path}:{node.lineno}: {called}"
        if called == "Live":
            assert any(word.arg == "console" for word in node.keywords), path
        if called in ("rich.progress.Progress", "Progress") and "progress.py" in path.name:
            assert any(word.arg == "console" for word in node.keywords), path


def re_writes(called: str) -> bool:
    ways = ("sys.stdout.write", "sys.stdout.buffer.write", "sys.stderr.write", "sys.stderr.buffer")
    return called.startswith((*ways, "sys.__std")) or called in (
        "os.write",
        "rich.print",
        "Console",
    )
