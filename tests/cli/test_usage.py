"""Errors about wrong usage, and exit codes."""

from __future__ import annotations

import io
import json
import logging
import socket
from pathlib import Path
from typing import Any

import pytest

from datastreamer.cli.shared import exit_codes as outcome
from datastreamer.cli.shared import logs
from datastreamer.cli.shared.addresses import server_address
from datastreamer.errors import DatastreamerError
from tests.cli.conftest import Invoke
from tests.cli.process import done


@pytest.mark.parametrize(
    "words, message",
    [
        (["cat"], "Missing argument"),
        (["nonsense"], "No such command"),
        (["cat", "FILE", "--nonsense"], "No such option: --nonsense"),
        (["cat", "FILE", "--from", "-1"], "--from is a number from 0 to"),
        (["cat", "FILE", "--from", "1e3"], "--from is a number from 0 to"),
        (["cat", "FILE", "--from", "18446744073709551616"], "--from is a number from 0 to"),
        (["cat", "FILE", "--to", "x"], "it is a number from 0 to"),
        (["cat", "FILE", "--from", "5", "--to", "4"], "--to 4 is less than --from 5"),
        (["cat", "FILE", "--from", "5", "--from-bookmark", "x"], "exclude each other"),
        (["cat", "FILE", "--last", "5", "--from", "5"], "exclude each other"),
        (["cat", "FILE", "--to", "5", "--to-bookmark", "x"], "exclude each other"),
        (["demo", "FILE", "--ops", "5", "--size", "1MB"], "exclude each other"),
        (["demo", "FILE", "--size", "1"], "it is a size, such as 1GB or 500MiB"),
        (["ct", "FILE"], "did you mean 'cat'?"),
        (["cat", "FILE", "--type", "0xg"], "an entry type is a number from 0 to 4294967295"),
        (["cat", "FILE", "--type", "4294967296"], "an entry type is a number"),
        (["cat", "FILE", "--timeout", "5"], "--timeout is for servers"),
        (
            ["cat", "localhost:1", "--timeout", "0"],
            "it is a number of seconds from 0.001 to 1e+06, not '0'",
        ),
        (
            ["cat", "localhost:1", "--timeout", "inf"],
            "it is a number of seconds from 0.001 to 1e+06",
        ),
        (["cat", "localhost:1", "--timeout", "9" * 5000], f"not '{'9' * 57}...'"),
        (["cat", "FILE", "--from", "9" * 5000], f"not '{'9' * 57}...'"),
        (["cat", "FILE", "--type", "0x" + "f" * 5000], f"not '0x{'f' * 55}...'"),
        (
            ["spark", "ingest", "FILE", "OUT", "--every", "nan"],
            "it is a number of seconds from 0 to 1e+06",
        ),
        (["cat", "FILE", "--format", "xml"], "'xml' is not one of"),
        (
            ["cat", "FILE", "--json", "--format", "hex"],
            "--json and --format hex exclude each other",
        ),
        (["cat", "FILE", "--log-level", "loud"], "'loud' is not one of"),
        (["entry", "FILE"], "Missing argument"),
        (["entry", "FILE", "x"], "it is a number from 0 to"),
        (["bookmark", "FILE", "0x123"], "'0x123' is not hex: 0x and two digits per byte"),
        (["bookmark", "FILE", "0x"], "the key of a bookmark has 1 to 16 bytes, '0x' has 0"),
        (["bookmark", "FILE", "0x" + "00" * 17], "has 17"),
        (["bookmark", "FILE", ""], "'' has 0"),
        (["bookmark", "FILE", "seventeen letters"], "'seventeen letters' has 17"),
        (["bookmark", "FILE", "block:x"], "the part after block: is a number"),
        (["bookmark", "FILE", "batch:"], "the part after batch: is a number"),
        (["serve", "FILE", "--port", "65536"], "it is a number from 0 to 65535"),
        (["serve", "FILE", "--system-id", "7"], "require --create"),
        (["serve", "FILE", "--create", "--stream-version", "0"], "it is a number from 1 to 255"),
        (["serve", "FILE", "--create", "--follow"], "--create and --follow exclude each other"),
        (["serve", "FILE", "--max-clients", "0"], "it is a number from 1 to"),
        (["serve", "FILE", "--reserved-clients", "9"], "no other client can use these slots"),
        (
            ["relay", "--server", "h:1", "--file", "f", "--reserved-clients", "9"],
            "use these slots",
        ),
        (["serve", "FILE", "--sync", "never"], "'never' is not one of"),
        (["append", "FILE", "--system-id", "7"], "require --create"),
        (["truncate", "FILE"], "Missing argument"),
        (["truncate", "FILE", "-1"], "No such option: -1 (numbers are not negative)"),
        (["entry", "FILE", "-1"], "(numbers are not negative)"),
        (["entry", "FILE", "-x"], "No such option: -x"),
        (["truncate", "FILE", "x"], "it is a number from 0 to"),
        (["snapshot", "FILE"], "Missing argument"),
        (["import-leveldb", "FILE", "--format", "raw"], "'raw' is not one of"),
        (["demo", "FILE", "--rate", "-1"], "operations per second"),
        (["demo", "FILE", "--rate", "nan"], "operations per second"),
        (["info", "tcp://"], "'tcp://' names no host"),
        (["info", "http://here"], "write the server as tcp://HOST:PORT"),
        (["info", "tcps://::1"], "is not tcps://HOST:PORT; write an IPv6 address as [::1]:6900"),
        (["info", ":6900"], "names no host"),
        (["info", "localhost:65536"], "a port is a number from 1 to 65535"),
        (["info", "localhost:" + "9" * 5000], "a port is a number from 1 to 65535"),
        (["info", "localhost:0"], "a port is a number from 1 to 65535"),
    ],
)
def test_wrong_usage(invoke: Invoke, made: Path, words: list[str], message: str) -> None:
    words = [str(made) if word == "FILE" else word for word in words]
    result = invoke(*words).failed(2).lower()
    assert message.lower() in result
    assert "value error" not in result


@pytest.mark.parametrize("option", ["--client-token-file", "--server-token-file"])
def test_a_missing_token_file(invoke: Invoke, made: Path, option: str) -> None:
    relay = ("relay", "--server", "localhost:1", "--file", made.with_name("relay.bin"))
    for words in (relay, ("serve", made)):
        if option == "--client-token-file" or words is relay:
            result = invoke(*words, option, made.with_name("none")).failed(1)
            assert "none: cannot be read: No such file or directory" in result
    assert not made.with_name("relay.bin").exists()


def test_leading_zeros_are_ignored(invoke: Invoke, made: Path) -> None:
    assert invoke("entry", made, "0" * 5000 + "7") == invoke("entry", made, "7")
    assert invoke("cat", made, "--type", "0x" + "0" * 50 + "3") == invoke(
        "cat", made, "--type", "3"
    )


@pytest.mark.parametrize("group", ["zkevm", "spark"])
def test_groups_accept_the_options_of_the_log(invoke: Invoke, made: Path, group: str) -> None:
    words = (group, "--log-level", "error", "--log-format", "json")
    assert invoke(*words).code == 0
    result = invoke(*words, "nonsense")
    assert result.code == 2
    assert json.loads(result.err.splitlines()[0])["message"].startswith("No such command")


def test_wrong_usage_names_the_help(invoke: Invoke, made: Path) -> None:
    hint = invoke("entry", made, "x").err.splitlines()[1]
    assert hint == "run datastreamer entry -h for help"


@pytest.mark.parametrize("verb", ["info", "cat", "entry", "bookmark"])
@pytest.mark.parametrize(
    "name, message",
    [
        ("missing.bin", "missing.bin: no such file"),
        ("no-such-host", "no-such-host: no such file, and no server: cannot connect to no-such-"),
        ("a/missing", "a/missing: no such file"),
        ("::1:6900", "::1:6900: no such file, and not HOST:PORT; write an IPv6 address as"),
        ("tcps://localhost:1", "cannot connect to localhost:1"),
        ("folder", "folder: is a folder, not a stream file"),
        ("text", "text: not a stream file"),
        ("short", "short: not a stream file"),
        ("cut", "cut: at byte 6000: the file ends here, but its data ends at byte"),
        ("absent", "cannot connect to 127.0.0.1:"),
    ],
)
def test_sources_that_cannot_be_read(
    invoke: Invoke,
    made: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    verb: str,
    name: str,
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("folder").mkdir()
    Path("text").write_text("no stream\n" * 1000)
    Path("short").write_bytes(made.read_bytes()[:100])
    Path("cut").write_bytes(made.read_bytes()[:6000])
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        if name == "absent":
            name = f"127.0.0.1:{silent.getsockname()[1]}"
        more = {"entry": ["0"], "bookmark": ["block:0"]}.get(verb, [])
        assert message in invoke(verb, name, *more).failed()


def test_a_damaged_file(invoke: Invoke, copy: Path) -> None:
    content = bytearray(copy.read_bytes())
    at = content.index(b"\x02\x00\x00\x00\x59", 8000)  # an EndL2Block's head
    content[at] = 9
    copy.write_bytes(content)
    for words in (["info", copy], ["cat", copy], ["cat", copy, "--follow"]):
        assert "the entries do not match their checksum" in invoke(*words).failed()


def test_a_server_of_another_type(invoke: Invoke, server: str, made: Path) -> None:
    assert "another stream type than 7" in invoke("info", server, "--stream-type", "7").failed()
    assert "is of type 1, not 7" in invoke("info", made, "--stream-type", "7").failed()
    assert invoke("info", server, "--stream-type", "1").code == 0


def test_a_path_that_exists_wins(
    invoke: Invoke, copy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(copy.parent)
    copy.rename("localhost:1")
    assert invoke("info", "localhost:1").objects[0]["total_entries"] == 200


@pytest.mark.parametrize("name", ["folder/name:7", "name.bin", "name:7/"])
def test_what_is_a_path(name: str) -> None:
    assert server_address(name) is None


def test_reading_writes_nothing(invoke: Invoke, made: Path, copy: Path) -> None:
    def everything() -> dict[str, Any]:
        return {
            str(path): (path.stat().st_mtime_ns, path.read_bytes() if path.is_file() else None)
            for path in sorted(copy.parent.rglob("*"))
        }

    commands = [
        *(["info"], ["cat"], ["entry", "3"], ["bookmark", "block:39"], ["cat", "--count", "1"]),
        *(["cat", "--from-bookmark", "batch:3"], ["bookmark", "block:2", "--entry-number"]),
    ]
    before = everything()
    for verb, *more in commands:
        assert invoke(verb, copy, *more).code == 0
    assert everything() == before
    # With an index beside it:
    assert invoke("demo", copy, "--ops", "1").code == 0
    before = everything()
    for verb, *more in commands:
        assert invoke(verb, copy, *more).code == 0
    assert everything() == before


def test_help(invoke: Invoke, invoke_dsapp: Invoke) -> None:
    for words in ([], ["-h"], ["--help"]):
        shown = invoke(*words)
        assert (shown.code, shown.err) == (0, "")
        for verb in ("serve", "info", "cat", "entry", "bookmark", "demo"):
            assert f"\n  {verb} " in shown.out.decode()
            verbs = invoke(verb, "-h")
            assert verbs.code == 0
            assert b"--log-level" in verbs.out
            assert verbs.out == invoke(verb, "--help").out
    assert invoke("--version").out.startswith(b"datastreamer 0.")


def test_the_log(invoke: Invoke, copy: Path, tmp_path: Path) -> None:
    words = ("demo", copy, "--ops", "1", "--log-format", "json")
    (line,) = invoke(*words).err.splitlines()
    assert "200" not in json.loads(line)["message"]
    failed = invoke("--log-format", "json", "entry", copy, "9999")
    (line,) = failed.err.splitlines()
    assert (failed.code, json.loads(line)["level"]) == (1, "error")
    assert "DEBUG" not in invoke("entry", copy, "0").err


def test_an_internal_error_is_one_line(invoke: Invoke, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise ZeroDivisionError("of\nall things")

    monkeypatch.setattr("datastreamer.cli.verbs.info.open_source", fail)
    message = "internal error: ZeroDivisionError: of all things"
    assert invoke("info", "x").failed() == message
    result = invoke("info", "x", "--log-level", "debug")
    assert result.err.startswith(f"error: {message}\n")
    assert "Traceback" in result.err


@pytest.mark.parametrize(
    "error, line, code",
    [
        (OSError(5, "Input/output error", "a.bin"), "error: a.bin: Input/output error\n", 1),
        (OSError(28, "No space left on device"), "error: No space left on device\n", 1),
        (OSError("odd"), "error: odd\n", 1),
        (
            ModuleNotFoundError(name="datastreamer._codec"),
            "error: datastreamer._codec is not compiled: `make core` compiles a checkout\n",
            1,
        ),
        (DatastreamerError("it\n  failed"), "error: it failed\n", 1),
        (KeyboardInterrupt(), "error: interrupted\n", 130),
        (outcome.Terminated(), "error: ended by SIGTERM\n", 143),
    ],
)
def test_errors_are_lines(
    capsys: pytest.CaptureFixture[str], error: BaseException, line: str, code: int
) -> None:
    def fail() -> int:
        raise error

    assert outcome.guard(fail) == code
    assert capsys.readouterr() == ("", line)


def test_the_first_error_of_a_group_is_reported(capsys: pytest.CaptureFixture[str]) -> None:
    class Group(Exception):
        exceptions = (DatastreamerError("the reason"), ValueError("another"))

    def fail() -> int:
        raise Group

    assert outcome.guard(fail) == 1
    assert capsys.readouterr().err == "error: the reason\n"


def test_a_closed_log_does_not_stop_the_program(monkeypatch: pytest.MonkeyPatch) -> None:
    class Gone(io.StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError

    monkeypatch.setattr("sys.stderr", Gone())
    with logs.to_stderr():
        logging.getLogger("datastreamer").warning("a line without a reader")
        logs.say_error("nor this")


def test_the_module_is_the_program(tmp_path: Path) -> None:
    failed = done("entry", "missing.bin", "0", cwd=tmp_path)
    assert (failed.returncode, failed.stdout) == (1, "")
    assert failed.stderr == "error: missing.bin: no such file\n"
    assert done("entry", "missing.bin", cwd=tmp_path).returncode == 2
