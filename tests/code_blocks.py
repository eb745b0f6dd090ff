"""Runs the code blocks of a page as they stand, in their order, in a folder with a stream.

A comment in front of a block says what is special about it:

<!-- needs: Spark -->      the block is not run: it needs this
<!-- until stopped -->     the block does not end: it runs until the next one of this kind begins
<!-- in the background --> it runs until the page ends

`python -m tests.code_blocks` reads a page and a folder from each line, runs the page in a fork of
itself, which has all modules already, and prints the exit code. It is in a network of its own
(`isolated`), because the blocks name ports and hosts. A page that connects to port 6900 and starts
no server there has one of the stream. Blocks of Python share the process, but no names.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import traceback
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple

import datastreamer
from datastreamer import StreamServer

OUTPUT = "output.txt"
FENCE = re.compile(
    r"(?:^ *<!-- (?P<mark>.*?) -->\n)?^(?P<indent> *)```(?P<language>\w*).*?\n(?P<text>.*?)^ *```$",
    re.MULTILINE | re.DOTALL,
)
RUN = {
    "python": [sys.executable, "-W", "error", "-u", "-c"],
    "sh": ["bash", "-euo", "pipefail", "-c"],
}
# Connect to port 6900, of another host, or of this one; start a server there.
ELSEWHERE = re.compile(r"(sequencer|node2)\W+6900")
HERE = re.compile(r"127\.0\.0\.1\W+6900")
SERVES = re.compile(" serve |port=6900")
HOSTS = "sequencer node2 node3 other-relay a b host backup.example stream.example localhost"
ISOLATE = """
ip link set lo up
for address in 10.0.0.2 10.0.0.3 10.0.0.5; do ip address add $address/32 dev lo; done
mount --bind "$0" /etc/hosts
exec "$@"
"""


class CodeBlock(NamedTuple):
    language: str
    text: str
    mark: str
    line: int


def code_blocks(page: str) -> Iterator[CodeBlock]:
    for found in FENCE.finditer(page):
        text = re.sub(f"^{found['indent']}", "", found["text"], flags=re.MULTILINE)
        line = page.count("\n", 0, found.start("language")) + 1
        yield CodeBlock(found["language"], text, found["mark"] or "", line)


def isolated(words: list[str], folder: Path) -> list[str]:
    """A command that runs another in a network of its own, with the hosts that pages name."""
    (folder / "hosts").write_text(f"127.0.0.1 {HOSTS}\n::1 localhost\n")
    root = [] if os.geteuid() == 0 else ["--map-root-user"]
    return [
        "unshare",
        *root,
        "--net",
        "--mount",
        "sh",
        "-euc",
        ISOLATE,
        str(folder / "hosts"),
        *words,
    ]


def run(page: Path) -> None:
    blocks = [block for block in code_blocks(page.read_text()) if block.language in RUN]
    blocks = [block for block in blocks if not block.mark.startswith("needs: ")]
    # What blocks connect to before one of them serves.
    first = next((n for n, block in enumerate(blocks) if SERVES.search(block.text)), len(blocks))
    programs = "".join(block.text for block in blocks)
    with ExitStack() as background, ExitStack() as given, ExitStack() as current:
        if ELSEWHERE.search(programs) or any(HERE.search(block.text) for block in blocks[:first]):
            server = StreamServer("served.bin", host="127.0.0.1", port=6900, in_process=True)
            given.enter_context(server)
        for number, block in enumerate(blocks):
            name = f"{page}:{block.line}"
            print(name, flush=True)
            if number == first and not ELSEWHERE.search(programs):
                current.close()
                given.close()
            if block.mark == "until stopped":
                current.close()
                current.enter_context(running(block))
            elif block.mark == "in the background":
                background.enter_context(running(block))
            elif block.language == "python":
                exec(compile(block.text, name, "exec"), {"__name__": "__main__"})
            else:
                shell(block.text)


def shell(script: str) -> None:
    """Run a script, which prints what it says that it prints."""
    done = subprocess.run(
        [*RUN["sh"], script],
        check=True,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
    )
    print(done.stdout, end="", flush=True)
    for said in re.findall("^# prints (.*)$", script, re.MULTILINE):
        pattern = re.escape(said).replace(re.escape("..."), ".*")
        if not re.search(f"^{pattern}$", done.stdout, re.MULTILINE):
            raise RuntimeError(f"the block says that it prints {said}")


@contextmanager
def running(block: CodeBlock) -> Iterator[None]:
    """Run a block beside the others. It serves, or has printed something, and does not end."""
    with subprocess.Popen(
        [*RUN[block.language], block.text],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        process_group=0,
    ) as process:
        assert process.stdout
        for line in process.stdout:
            print(line, end="", flush=True)
            if line.startswith("Traceback"):
                raise RuntimeError(f"the block raises {process.stdout.read()}")
            if "serving" in line or not re.search(" (serve|relay) ", block.text):
                break
        try:
            yield
        finally:
            ended = process.poll()
            if ended is None:
                os.killpg(process.pid, signal.SIGTERM)
                process.communicate()
        if ended is not None:
            raise RuntimeError(f"a block ended early, with exit code {ended}")


def run_pages() -> None:
    for name in datastreamer.__all__:
        getattr(datastreamer, name)  # loads it
    for line in sys.stdin:
        page, folder = json.loads(line)
        child = os.fork()
        if child == 0:
            signal.alarm(60)
            os.chdir(folder)
            output = os.open(OUTPUT, os.O_CREAT | os.O_WRONLY | os.O_APPEND)
            os.dup2(output, 1)
            os.dup2(output, 2)
            code = 1
            try:
                run(Path(page))
                code = 0
            except Exception:
                traceback.print_exc()
                raise
            finally:
                os._exit(code)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


if __name__ == "__main__":
    run_pages()
