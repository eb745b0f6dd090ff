"""Publishing between processes: commands, exit codes, and the stream after `kill -9`."""

from __future__ import annotations

import json
import re
import signal
import socket
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from datastreamer.protocol.retry import Backoff
from datastreamer.publisher.blocking_publisher import BlockingPublisher
from datastreamer.storage.stream import DataStream
from tests.cli.process import ENVIRONMENT, Running, command, running

QUICK = Backoff(0.01, 0.1)


@pytest.fixture
def token(tmp_path: Path) -> Path:
    path = tmp_path / "token"
    path.write_text("a token\nanother\n")
    path.chmod(0o600)
    return path


@contextmanager
def serving(folder: Path, token: Path, port: int = 0) -> Iterator[tuple[Running, int]]:
    words = ("--create", "--host", "127.0.0.1", "--port", port, "--publish-token-file", token)
    with running("serve", "s.bin", *words, cwd=folder) as server:
        yield server, server.port()


def append(
    folder: Path, lines: list[object], *words: object, verb: str = "append"
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(verb, *words),
        input="".join(json.dumps(line) + "\n" for line in lines),
        cwd=folder,
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


ONE = {"type": 3, "data": "0x01"}
COMMIT = {"commit": True}


def contents(folder: Path) -> list[tuple[int, bytes]]:
    with DataStream.open(folder / "s.bin", read_only=True) as stream:
        return [(e.type, e.data) for e in stream.entries()]


def test_append_to_a_server(tmp_path: Path, token: Path) -> None:
    with serving(tmp_path, token) as (server, port):
        place = f"tcp://127.0.0.1:{port}"
        show = ("--token-file", token)
        lines: list[object] = [{"bookmark": "0x6b"}, ONE, COMMIT, ONE, {"rollback": True}, COMMIT]
        done = append(tmp_path, lines, place, *show)
        assert (done.returncode, done.stderr) == (0, "")
        assert [json.loads(line) for line in done.stdout.splitlines()] == [
            {"first_entry": 0, "entries": 2, "total_entries": 2},
            {"first_entry": 2, "entries": 0, "total_entries": 2},
        ]
        done = append(tmp_path, [ONE, COMMIT, ONE], place, *show)
        assert done.returncode == 1
        assert "without a commit; the open operation (1 entry) was rolled back" in done.stderr
        assert "holds 3 entries" in done.stderr
        # Entries that the stream holds are not appended again; other entries are rejected.
        again = append(tmp_path, [ONE, COMMIT, ONE, COMMIT], place, *show, "--next-entry", 2)
        assert again.returncode == 0
        other = append(tmp_path, [{"type": 4, "data": "0x01"}, COMMIT], place, *show,
                       "--next-entry", 3)  # fmt: skip
        assert other.returncode == 1
        assert re.search(
            r"error: line 2: .*Other entries: entries 3 to 3 of the operation differ", other.stderr
        )
        assert "may be in the stream" not in other.stderr
        typed = append(tmp_path, [ONE, COMMIT], place, *show, "--stream-type", 2)
        assert typed.returncode == 1
        assert "servers of another stream type than 2" in typed.stderr
        (tmp_path / "wrong").write_text("wrong")
        (tmp_path / "wrong").chmod(0o600)
        refused = append(tmp_path, [ONE, COMMIT], place, "--token-file", "wrong")
        assert (refused.returncode, refused.stdout) == (1, "")
        assert re.fullmatch(r"error: .*Not allowed: .* \(error 16\)\n", refused.stderr)
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(30) == 0
    assert contents(tmp_path) == [(0xB0, b"k"), (3, b"\1"), (3, b"\1"), (3, b"\1")]


def test_split_to_a_server(tmp_path: Path, token: Path) -> None:
    with serving(tmp_path, token) as (server, port):
        show = (f"tcp://127.0.0.1:{port}", "--token-file", token)

        def split(*numbers: int, options: tuple[object, ...] = ()) -> Any:
            lines: list[object] = [{"id": f"0x{n:064x}", "parts": []} for n in numbers]
            return append(tmp_path, lines, *show, *options, verb="split")

        done = split(1, 2)
        assert (done.returncode, done.stderr) == (0, "")
        assert [json.loads(line) for line in done.stdout.splitlines()] == [
            {"id": f"0x{1:064x}", "messages": 1, "first_entry": 0, "entries": 2,
             "total_entries": 2},
            {"id": f"0x{2:064x}", "messages": 1, "first_entry": 2, "entries": 2,
             "total_entries": 4},
        ]  # fmt: skip
        # What the stream holds is compared; other payloads are refused.
        assert split(2, 3, options=("--next-entry", 2)).returncode == 0
        other = split(9, options=("--next-entry", 2))
        assert other.returncode == 1
        assert re.search(r"error: line 1: .*Other entries: entries 2 to 3", other.stderr)
        assert "for files" in split(1, options=("--create",)).stderr
        known = append(tmp_path, [{}], *show, "--next-entry", 0, verb="split").stderr
        assert known.endswith("the stream holds 6 entries\n")
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(30) == 0
    assert [data[-1] for _, data in contents(tmp_path)[1::2]] == [1, 2, 3]


def pass_on(source: socket.socket, target: socket.socket) -> None:
    with suppress(OSError):
        while data := source.recv(65536):
            target.sendall(data)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_wait_for_a_lost_server(
    tmp_path: Path, token: Path, number: signal.Signals
) -> None:
    with (
        serving(tmp_path, token) as (_, port),
        socket.create_server(("127.0.0.1", 0)) as between,
        subprocess.Popen(
            command("append", f"tcp://127.0.0.1:{between.getsockname()[1]}", "--token-file", token,
                    "--retry-for", 100_000),
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            cwd=tmp_path, env=ENVIRONMENT, text=True,
        ) as appending,
    ):  # fmt: skip
        assert appending.stdin is not None
        assert appending.stdout is not None
        assert appending.stderr is not None
        between.settimeout(60)
        source = between.accept()[0]
        with source, socket.create_connection(("127.0.0.1", port)) as server:
            for ends in ((source, server), (server, source)):
                threading.Thread(target=pass_on, args=ends, daemon=True).start()
            for line in (ONE, COMMIT):
                appending.stdin.write(json.dumps(line) + "\n")
                appending.stdin.flush()
            assert json.loads(appending.stdout.readline())["total_entries"] == 1
            for end in (source, server):
                end.shutdown(socket.SHUT_RDWR)
        for line in (ONE, COMMIT):
            appending.stdin.write(json.dumps(line) + "\n")
            appending.stdin.flush()
        # It reconnects for a long time.
        between.accept()[0].close()
        appending.send_signal(number)
        between.close()
        assert appending.wait(60) == 128 + number
        *_, said = appending.stderr.read().splitlines()
        assert re.fullmatch(
            r"error: (interrupted|ended by SIGTERM) at line 4, which the server did not "
            r"acknowledge within a second; the operation from entry 1 on may be in the stream: "
            r"send it again with --next-entry 1, which compares it instead of appending it twice",
            said,
        ), said


@pytest.mark.parametrize("verb", ["append", "split"])
def test_a_signal_ends_the_wait_for_a_server_that_hangs(
    tmp_path: Path, token: Path, verb: str
) -> None:
    late = b"\x99" * 32
    line = {"type": 3, "data": f"0x{late.hex()}"}
    lines: list[object] = (
        [line, COMMIT] if verb == "append" else [{"id": line["data"], "parts": []}]
    )
    seen = threading.Event()

    def pass_on_until_late(source: socket.socket, target: socket.socket) -> None:
        while late not in (data := source.recv(65536)):
            target.sendall(data)
        seen.set()

    with (
        serving(tmp_path, token) as (_, port),
        socket.create_server(("127.0.0.1", 0)) as between,
        subprocess.Popen(
            command(verb, f"tcp://127.0.0.1:{between.getsockname()[1]}", "--token-file", token),
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            cwd=tmp_path, env=ENVIRONMENT, text=True,
        ) as writing,
    ):  # fmt: skip
        assert writing.stdin is not None
        assert writing.stderr is not None
        between.settimeout(60)
        source = between.accept()[0]
        with source, socket.create_connection(("127.0.0.1", port)) as server:
            threading.Thread(target=pass_on_until_late, args=(source, server), daemon=True).start()
            threading.Thread(target=pass_on, args=(server, source), daemon=True).start()
            writing.stdin.write("".join(json.dumps(each) + "\n" for each in lines))
            writing.stdin.flush()
            assert seen.wait(60)
            writing.send_signal(signal.SIGTERM)
            assert writing.wait(60) == 143
        *_, said = writing.stderr.read().splitlines()
    assert said == (
        f"error: ended by SIGTERM at line {len(lines)}, which the server did not acknowledge "
        "within a second; the operation from entry 0 on may be in the stream: send it again with "
        "--next-entry 0, which compares it instead of appending it twice"
    )


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("s.bin", "--token-file", "t"), "--token-file is for tcp://HOST:PORT"),
        (("s.bin", "--take-over"), "--take-over is for tcp://HOST:PORT"),
        (("tcp://127.0.0.1:1", "--create"), "are for files"),
        (("tcp://127.0.0.1:1", "--epoch", "3", "--take-over"), "--take-over uses the next"),
        (("tcp://127.0.0.1:x", "--epoch", "3"), "is not tcp://HOST:PORT"),
    ],
)
def test_wrong_usage_of_append(tmp_path: Path, words: tuple[str, ...], says: str) -> None:
    done = append(tmp_path, [], *words)
    assert done.returncode == 2
    assert says in done.stderr


def test_tokens_that_others_can_read(tmp_path: Path, token: Path) -> None:
    token.chmod(0o604)
    says = r"error: .*token: holds a secret, and its mode 0604 .*--allow-readable-secrets.*\n"
    words = ("--create", "--host", "127.0.0.1", "--port", 0, "--publish-token-file", token)
    refused = append(tmp_path, [], "tcp://127.0.0.1:1", "--token-file", token)
    assert (refused.returncode, refused.stdout) == (1, "")
    assert re.fullmatch(says, refused.stderr)
    done = subprocess.run(
        command("serve", "s.bin", *words),
        cwd=tmp_path,
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 1
    assert re.fullmatch(says, done.stderr)
    allow = "--allow-readable-secrets"
    with running("serve", "s.bin", *words, allow, cwd=tmp_path) as server:
        place = f"tcp://127.0.0.1:{server.port()}"
        assert not append(tmp_path, [ONE, COMMIT], place, "--token-file", token, allow).returncode
        # The option affects only this call.
        assert append(tmp_path, [ONE, COMMIT], place, "--token-file", token).returncode == 1
    assert contents(tmp_path) == [(3, b"\1")]


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        (("--publish-token-file", "none"), 1, "none: cannot be read: No such file"),
        (("--publish-token-file", "token", "--workers", "2"), 2, "one of --workers"),
        (("--publish-token-file", "token", "--follow"), 2, "excludes --follow"),
        (("--publish-client-cert", "x"), 2, "requires --tls-client-ca"),
    ],
)
def test_wrong_usage_of_serve(
    tmp_path: Path, token: Path, words: tuple[str, ...], code: int, says: str
) -> None:
    done = subprocess.run(
        command("serve", "s.bin", "--port", "0", *words),
        cwd=tmp_path,
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, says in done.stderr) == (code, True), done.stderr
    assert not (tmp_path / "s.bin").exists()


def test_the_server_is_killed_repeatedly(tmp_path: Path, token: Path) -> None:
    """The stream holds each operation once, and all that were acknowledged before a kill."""
    port, number, acknowledged = 0, 0, 0
    publisher: BlockingPublisher | None = None
    for turn in range(4):
        with serving(tmp_path, token, port) as (server, port):
            if publisher is None:
                publisher = BlockingPublisher(
                    "127.0.0.1", port, token="a token", backoff=QUICK, timeout=30
                )
            for _ in range(200):
                with_two = publisher.atomic_op()
                with_two.add_bookmark(b"%d" % number)
                with_two.add_entry(3, b"%d" % number)
                pending = with_two.commit(wait=False)
                number += 1
            if turn % 2:
                pending.wait()
                acknowledged = number
            server.process.send_signal(signal.SIGKILL)
            server.process.wait(30)
        assert len(contents(tmp_path)) >= 2 * acknowledged
    assert publisher is not None
    with serving(tmp_path, token, port):
        publisher.flush()
        assert publisher.total_entries == 2 * number
        assert publisher.epoch == 1
        publisher.close()
    wanted = [item for n in range(number) for item in ((0xB0, b"%d" % n), (3, b"%d" % n))]
    assert contents(tmp_path) == wanted


def test_a_publisher_is_killed(tmp_path: Path, token: Path) -> None:
    """Its open operation is rolled back, and the next source continues at once."""
    with serving(tmp_path, token) as (server, port):
        words = (f"tcp://127.0.0.1:{port}", "--token-file", token)
        first = subprocess.Popen(
            command("append", *words),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=tmp_path,
            env=ENVIRONMENT,
            text=True,
        )
        assert first.stdin is not None
        assert first.stdout is not None
        with first:
            for line in (ONE, COMMIT, ONE):
                print(json.dumps(line), file=first.stdin, flush=True)
            assert json.loads(first.stdout.readline())["total_entries"] == 1
            busy = append(tmp_path, [ONE, COMMIT], *words)
            assert busy.returncode == 1
            assert "Another source holds the lease: its epoch is 1" in busy.stderr
            first.kill()
            first.wait(30)
        server.err.until("stopped publishing")
        done = append(tmp_path, [ONE, COMMIT], *words)
        assert (done.returncode, json.loads(done.stdout)["first_entry"]) == (0, 1)
    assert contents(tmp_path) == [(3, b"\1")] * 2
