"""Make the blocking faces of the asynchronous ones: the same calls for plain threads.

.ci/blocking.py            write them
.ci/blocking.py --check    raise if one differs from what would be written

An engine is written once; its faces differ in how they wait, in names and in words. What is
awaited there is called here, and a constructor does what entering the block does there. The tables
below have the names and the words; anything else that is asynchronous is an error.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "datastreamer"

NAMES = {
    "__aenter__": "__enter__",
    "__aexit__": "__exit__",
    "__aiter__": "__iter__",
    "__anext__": "__next__",
    "AsyncExitStack": "ExitStack",
    "StopAsyncIteration": "StopIteration",
    "_AsyncIterator": "_BlockingIterator",
    "_aclose": "close",
    "aclose": "close",
    "driver_to": "AsyncioDriver",
    "enter_async_context": "enter_context",
    **{name: f"Blocking{name}" for name in ("Batches", "Client", "Entries")},
    **{name: f"Blocking{name}" for name in ("Publisher", "Reassembly")},
    "PendingReceipt": "BlockingReceipt",
    "PublishedOp": "BlockingOp",
}
WORDS = {
    "An asynchronous": "A",
    "an asynchronous": "an",
    "``async ": "``",
    "another task": "another thread",
    " (and await what it returns, if it can be)": "",
}
# A constructor of a face has it as first argument; a blocking face has one kind of driver.
MAKER = "driver_to"


@dataclass
class Face:
    """One module: where it is written, its drivers, and its own docstrings by name."""

    source: str
    target: str
    driver: str
    home: str
    docs: dict[str, str] = field(default_factory=dict)


FACES = [
    Face(
        "client/async_client.py",
        "client/blocking_client.py",
        "ThreadDriver",
        "datastreamer.client.thread_driver",
        {
            "": """The client for plain threads: the same calls as `async_client`.

This is what a Spark executor or a notebook loads. Must not import trio.""",
            "BlockingEntries": "Entries one by one: an iterator, begun and ended as its batches.",
            "BlockingClient": """A connection to a server, made at once.

One thread at a time: any call except `stop` and `close` raises `UsageError` while another is in
progress. A call ends an iteration that was left open.

The options are those of `connect`; `timeout` (seconds) bounds the wait for an answer too.
The wait for streamed entries has no limit. Raises `ConnectFailed` and `TLSFailed`. Errors and
lost connections leave what they leave of a `Client`.""",
            "BlockingClient.stop": """\
End the iteration that is open, or the wait of a `batch_read`, without an error.

While another thread waits for its next item, that thread still receives what has
arrived, and the connection is given up; the next call makes another.""",
        },
    ),
    Face(
        "publisher/async_publisher.py",
        "publisher/blocking_publisher.py",
        "LoopDriver",
        "datastreamer.client.asyncio_driver",
        {
            "": """A publisher for plain synchronous code: the same calls as `async_publisher`.

A thread renews the lease, receives receipts and replaces lost connections while the caller does
something else. Must not import trio.""",
            "BlockingPublisher": """\
A stream's source: ``with BlockingPublisher("127.0.0.1", 6900, token=token) as publisher``.

The options and errors are those of `connect_publisher`. One thread makes operations; any may
wait for them. Refusals are raised as by a `Publisher`.""",
        },
    ),
    Face(
        "consumer/async_reassembly.py",
        "consumer/blocking_reassembly.py",
        "LoopDriver",
        "datastreamer.client.asyncio_driver",
        {
            "": """The reassembly for plain synchronous code: the same calls as `async_reassembly`.

A thread reads the sources; what arrives is processed in the caller's. Must not import trio.""",
            "BlockingReassembly": """\
An iterator over payloads, and a context manager; the options are those of `reassemble`::

    with BlockingReassembly([("a", 6900), ("b", 6900)], subscribe=[b"\\x01"]) as payloads:
        for payload in payloads:
            ...

After a KeyboardInterrupt it delivers and saves nothing more; a new reassembly resumes from the
last save. The thread that requests payloads uses the store and calls `on_event`. One thread at
a time. Another thread may read `stats`, `sources` and `samples` while no call is in progress.""",
            "BlockingReassembly.close": """\
End the thread and its connections. Nothing is saved. A second call does nothing.""",
            "BlockingReassembly.next": """\
The next payload. None at the end, and if no payload is complete within `seconds`.""",
        },
    ),
]


class Blocking(ast.NodeTransformer):
    """Turns the module of one face."""

    def __init__(self, face: Face) -> None:
        self.face = face
        self.path: list[str] = []

    def named(self, name: str) -> str:
        return self.face.driver if name == "AsyncDriver" else NAMES.get(name, name)

    def visit_Module(self, node: ast.Module) -> ast.AST:
        return self.documented(node, indent=0)

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.AST:
        node.name = self.named(node.name)
        self.documented(node, indent=4)
        methods = {each.name: each for each in node.body if isinstance(each, ast.FunctionDef)}
        if node.name in self.face.docs and "__enter__" in methods:
            *steps, last = methods["__enter__"].body
            methods["__init__"].body += steps
            methods["__enter__"].body = [last]
        return node

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        node.name = self.named(node.name)
        arguments = node.args.args
        if MAKER in [each.arg for each in arguments]:
            # Its options are documented by the function that makes the asynchronous one.
            node.args.args = [each for each in arguments if each.arg != MAKER]
            if ast.get_docstring(node) is not None:
                del node.body[0]
        return self.documented(node, indent=8)

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> ast.AST:
        fields: dict[str, Any] = {name: getattr(node, name) for name in node._fields}
        return self.visit_FunctionDef(ast.copy_location(ast.FunctionDef(**fields), node))

    def documented(self, node: Any, *, indent: int) -> ast.AST:
        """Turn what is inside, and the docstring."""
        self.path += [node.name] if indent else []
        own = self.face.docs.get(".".join(self.path))
        if (text := ast.get_docstring(node, clean=False)) is not None:
            for asynchronous, blocking in WORDS.items():
                text = text.replace(asynchronous, blocking)
            if own is not None:
                text = own.replace("\n", "\n" + " " * indent).replace(" " * indent + "\n", "\n")
                text += "\n" + " " * indent if "\n" in own else ""
            node.body[0].value.value = text
        self.generic_visit(node)
        self.path = self.path[:-1]
        return cast("ast.AST", node)

    def visit_ImportFrom(self, node: ast.ImportFrom) -> ast.AST:
        node.names = [
            ast.alias(NAMES.get(each.name, each.name), each.asname)
            for each in node.names
            if each.name not in ("AsyncDriver", "DriverTo")
        ]
        if not node.names:
            return ast.parse(
                f"from {self.face.home} import {self.face.driver}\n"
                "from datastreamer.client.asyncio_driver import AsyncioDriver\n"
            )
        return node

    def visit_Await(self, node: ast.Await) -> ast.AST:
        return cast("ast.AST", self.visit(node.value))

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        if isinstance(node.func, ast.Name) and node.func.id == NAMES[MAKER]:
            node.func.id = self.face.driver
        return node

    def visit_Name(self, node: ast.Name) -> ast.AST:
        node.id = self.named(node.id)
        return node

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        self.generic_visit(node)
        node.attr = self.named(node.attr)
        return node


def blocking(face: Face) -> str:
    """The text of a blocking face."""
    tree = Blocking(face).visit(ast.parse((PACKAGE / face.source).read_text()))
    for node in ast.walk(tree):
        if type(node).__name__.startswith("Async"):
            raise SystemExit(f"error: {face.source}:{node.lineno}: no rule for this")
    head = f"# Made by .ci/blocking.py from {face.source}: change that, and run it.\n"
    text = head + ast.unparse(ast.fix_missing_locations(tree)) + "\n"
    name = ["--stdin-filename", str(PACKAGE / face.target), "-"]
    text = ruff(text, "check", "--quiet", "--fix", "--select", "F401,I", *name)
    return ruff(text, "format", "--quiet", *name)


def ruff(text: str, *words: str) -> str:
    command = [sys.executable, "-m", "ruff", *words]
    return subprocess.run(command, input=text, text=True, check=True, stdout=subprocess.PIPE).stdout


def main() -> None:
    for face in FACES:
        path, text = PACKAGE / face.target, blocking(face)
        if "--check" not in sys.argv:
            path.write_text(text)
        elif path.read_text() != text:
            raise SystemExit(
                f"error: {face.target} differs from {face.source}; run .ci/blocking.py"
            )


if __name__ == "__main__":
    main()
