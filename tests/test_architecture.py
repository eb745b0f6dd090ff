"""The order of the layers, read from the source of every module.

A part (a module or folder directly under the package) may import only parts that
stand on a lower layer, and itself. What counts: imports at the top of a module, in
functions, under ``TYPE_CHECKING`` (a type that is named is a module that is known),
in stubs, in ``import_module("...")``, and in Cython sources. The package's own
``__init__`` stands apart: it names the public things for type checkers and loads
them on demand; at run time it imports none of the parts, and none imports from it
(but for ``__version__``).
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent / "datastreamer"

LAYERS = [
    {"errors", "format", "metrics", "printable"},
    {"position"},
    # What the compiled modules share: inlined, never imported at run time.
    {"_entry"},
    {"_run"},
    {"_codec"},
    {"_pages"},
    {"_chosen", "_lines", "_packer"},
    {"storage", "protocol", "reassembly", "zkevm"},
    {"net", "arrow"},
    {"spark"},
    {"cli"},
    {"__main__"},
]
LEVEL = {part: level for level, parts in enumerate(LAYERS) for part in parts}

# What else is not for everybody: module -> the parts that may import it.
ONLY_FOR = {
    "trio": {"net"},
    "lmdb": {"storage"},
    "plyvel": {"storage"},
    "typer": {"cli"},
    "click": {"cli"},
    "rich": {"cli"},
    "rlp": {"zkevm"},
    "coincurve": {"zkevm"},
    "sha3": {"zkevm"},
    "google": {"zkevm"},
    "prometheus_client": {"metrics"},
    "pyarrow": {"arrow", "spark"},
    "pyspark": {"spark"},
    "fastavro": {"reassembly"},
    "matplotlib": {"spark"},
}
# Bytes in, events out: these parts do no input or output, see no clock and keep no log.
SANS_IO = {
    *("errors", "format", "position", "printable", "_entry", "_run", "_codec"),
    *("_chosen", "_lines", "_packer", "_pages"),
    "protocol",
    "reassembly",
    "zkevm",
}
INPUT_OUTPUT = {
    *("asyncio", "datetime", "fcntl", "io", "logging", "mmap", "multiprocessing", "pathlib"),
    *("random", "select", "selectors", "signal", "socket", "ssl", "subprocess", "tempfile"),
    *("threading", "time"),
}

CYTHON_IMPORT = re.compile(
    r"^[ \t]*(?:from[ \t]+(?P<base>[.\w]+)[ \t]+c?import[ \t]*(?P<names>\([^)]*\)|[^\n]*)"
    r"|c?import[ \t]+(?P<modules>[^\n]+))",
    re.MULTILINE,
)


class Importing:
    """The modules that one source file imports, as absolute dotted names."""

    def __init__(self, package: str, path: Path, root: Path) -> None:
        self.package = package
        self.path = path
        inside = path.relative_to(root).with_suffix("")
        self.part = inside.parts[0]
        # The package that a relative import starts from.
        self.home = [package, *inside.parts[:-1]]

    def absolute(self, level: int, base: str) -> str:
        if not level:
            return base
        start = self.home[: len(self.home) - level + 1]
        return ".".join([*start, base] if base else start)

    def from_import(self, level: int, base: str, names: list[str]) -> Iterator[str]:
        """``from base import names``: of a package the names may be its modules."""
        module = self.absolute(level, base)
        for name in names:
            yield f"{module}.{name}"

    def found(self) -> Iterator[tuple[int, str]]:
        source = self.path.read_text()
        if self.path.suffix in (".pyx", ".pxd"):
            yield from self.in_cython(source)
        else:
            yield from self.in_python(ast.parse(source, str(self.path)))

    def in_python(self, tree: ast.AST) -> Iterator[tuple[int, str]]:
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                for alias in node.names:
                    yield node.lineno, alias.name
            elif isinstance(node, ast.ImportFrom):
                names = [alias.name for alias in node.names]
                for module in self.from_import(node.level, node.module or "", names):
                    yield node.lineno, module
            elif isinstance(node, ast.Call) and node.args:
                called = node.func.attr if isinstance(node.func, ast.Attribute) else ""
                called = node.func.id if isinstance(node.func, ast.Name) else called
                named = node.args[0]
                if called in ("import_module", "__import__") and isinstance(named, ast.Constant):
                    text = str(named.value)
                    level = len(text) - len(text.lstrip("."))
                    yield node.lineno, self.absolute(level, text.lstrip("."))

    def in_cython(self, source: str) -> Iterator[tuple[int, str]]:
        for match in CYTHON_IMPORT.finditer(source):
            line = source.count("\n", 0, match.start()) + 1
            if match["base"]:
                base = match["base"].lstrip(".")
                level = len(match["base"]) - len(base)
                names = re.sub(r"#[^\n]*|[()]", "", match["names"]).split(",")
                words = [name.split()[0] for name in names if name.strip()]
                for module in self.from_import(level, base, words):
                    yield line, module
            else:
                for name in match["modules"].split("#")[0].split(","):
                    yield line, name.split()[0]


def judge(package: str, part: str, module: str) -> str:
    """What is wrong with `part` importing `module`; "" if nothing is."""
    top, *rest = module.split(".")
    if top != package:
        if part not in ONLY_FOR.get(top, {part}):
            return f"{top} is for {', '.join(sorted(ONLY_FOR[top]))}"
        if part in SANS_IO and top in INPUT_OUTPUT:
            return f"{top} is input or output, a clock or a log"
        return ""
    imported = rest[0] if rest else ""
    if imported in (part, "__version__"):
        return ""
    if imported not in LEVEL:
        return f"{module} is no part of the package; a public name is imported from its home"
    if LEVEL[imported] >= LEVEL[part]:
        return f"{imported} does not stand below {part}"
    return ""


def violations(root: Path) -> list[str]:
    """One line for each import under `root`, a package's folder, that breaks the order."""
    broken: list[str] = []
    for path in sorted(root.rglob("*")):
        if path.suffix not in (".py", ".pyi", ".pyx", ".pxd"):
            continue
        importing = Importing(root.name, path, root)
        where = path.relative_to(root.parent)
        if importing.part == "__init__":
            continue
        if importing.part not in LEVEL:
            broken.append(f"{where}: {importing.part} has no place in the order of layers")
            continue
        for line, module in importing.found():
            wrong = judge(root.name, importing.part, module)
            if wrong:
                broken.append(f"{where}:{line}: {wrong}")
    return list(dict.fromkeys(broken))


def test_every_import_goes_down() -> None:
    assert violations(ROOT) == []


def test_reads_the_whole_package() -> None:
    parts = {path.relative_to(ROOT).parts[0].split(".")[0] for path in ROOT.rglob("*.py*")}
    assert {"errors", "format", "_codec", "_packer", "storage", "protocol", "net", "cli"} <= parts
    assert {"reassembly", "zkevm", "arrow"} <= parts


CLEAN = {
    "__init__.py": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n from toy.net import x\n",
    "errors.py": "",
    "format.py": "import struct\n",
    "_codec.pyx": "from libc.string cimport memcpy\ncimport cython\nfrom toy.errors import A\n",
    "_codec.pyi": "from toy.errors import A\n",
    "storage/__init__.py": "",
    "storage/file.py": "import lmdb, os\nfrom .. import format\nfrom . import page\n",
    "storage/page.py": "from .._codec import scan\nfrom toy import __version__\n",
    "protocol/server.py": "from toy.errors import A\n",
    "net/server.py": "import trio\nfrom toy.storage.file import F\nfrom toy.protocol import x\n",
    "cli/main.py": "import typer\nfrom toy.net import server\nfrom importlib import metadata\n",
}


def toy(folder: Path, files: dict[str, str]) -> Path:
    root = folder / "toy"
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_a_clean_package_has_no_violation(tmp_path: Path) -> None:
    assert violations(toy(tmp_path, CLEAN)) == []


@pytest.mark.parametrize(
    "name, text, message",
    [
        ("errors.py", "from toy.format import x", "1: format does not stand below errors"),
        ("storage/a.py", "import toy.net.server", "1: net does not stand below storage"),
        ("storage/a.py", "from toy import net", "1: net does not stand below storage"),
        ("storage/a.py", "from .. import net", "1: net does not stand below storage"),
        ("storage/a.py", "from ..net import server", "1: net does not stand below storage"),
        ("storage/b/a.py", "from ...net import server", "1: net does not stand below storage"),
        ("storage/a.py", "import toy.protocol", "1: protocol does not stand below storage"),
        ("protocol/a.py", "from toy.storage import f", "1: storage does not stand below protocol"),
        ("net/a.py", "def f():\n  from toy import cli", "2: cli does not stand below net"),
        ("net/a.py", "import importlib as i\ni.import_module('toy.cli')", "2: cli does not"),
        ("net/a.py", "from toy.arrow import x", "1: arrow does not stand below net"),
        (
            "protocol/a.py",
            "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n  from toy.net import S",
            "3: net does not stand below protocol",
        ),
        ("cli/a.py", "import trio", "1: trio is for net"),
        ("cli/a.py", "from trio.abc import Stream", "1: trio is for net"),
        ("net/a.py", "import lmdb", "1: lmdb is for storage"),
        ("protocol/a.py", "import socket", "1: socket is input or output"),
        ("protocol/a.pyi", "import time", "1: time is input or output"),
        ("net/a.py", "from toy import DataStream", "1: toy.DataStream is no part"),
        ("net/a.py", "import toy", "1: toy is no part"),
        ("helpers.py", "", " helpers has no place in the order of layers"),
        ("_codec.pyx", "from toy.storage cimport f", "1: storage does not stand below _codec"),
        ("_codec.pyx", "\ncimport toy.net", "2: net does not stand below _codec"),
        ("_codec.pyx", "cdef f():\n    import trio", "2: trio is for net"),
        ("storage/c.pyx", "from .. import (  # why\n  format,\n  net)", "1: net does not stand"),
        ("storage/c.pyx", "from toy.net cimport a, b, c", "1: net does not stand"),
        ("storage/c.pxd", "from toy.protocol cimport x", "1: protocol does not stand"),
    ],
)
def test_finds_a_violation(tmp_path: Path, name: str, text: str, message: str) -> None:
    found = violations(toy(tmp_path, {**CLEAN, name: text}))
    assert len(found) == 1
    assert found[0].startswith(f"toy/{name}:{message}")
