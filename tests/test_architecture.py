"""The rules of the layout, read from the source of every module.

Imports go one way: a part (a module or folder directly under the package) imports only
parts of lower layers, and itself. No circle of imports between files. A folder holds at
most fifteen modules, except the folder with one file a command. A class name has one owner.

What counts as an import: those at the top of a module, in functions, under
``TYPE_CHECKING`` (a type that is named is a module that is known), in stubs, in
``import_module("...")``, and in Cython sources. The package's own ``__init__`` is exempt:
it names the public things for type checkers and loads them on demand; at run time it
imports none of the parts, and no part imports it.
"""

from __future__ import annotations

import ast
import functools
import re
from collections import Counter
from collections.abc import Iterator
from itertools import combinations
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent / "datastreamer"

LAYERS = [
    {"_lazy", "_version", "errors", "format", "printable"},
    {"selection"},
    {"position", "metrics"},
    # What the compiled modules share: inlined, never imported at run time.
    {"_entry"},
    {"_run"},
    {"_codec"},
    {"_pages"},
    {"_filtered", "_lines", "_packer"},
    {"protocol", "storage", "reassembly", "zkevm"},
    {"transport", "arrow", "archive"},
    {"client", "server"},
    {"http"},
    {"publisher", "relay", "consumer"},
    {"aio", "service"},
    {"spark"},
    {"cli"},
    {"__main__"},
]
LEVEL = {part: level for level, parts in enumerate(LAYERS) for part in parts}

# External modules that only some parts may import: module -> these parts.
ASYNCHRONOUS = {
    *("transport", "client", "server", "http", "publisher", "relay", "consumer", "service"),
}
ONLY_FOR = {
    "trio": ASYNCHRONOUS,
    "asyncio": {"transport", "client", "publisher", "consumer", "aio"},
    "h11": {"http"},
    "lmdb": {"storage"},
    "plyvel": {"storage"},
    "typer": {"cli"},
    "click": {"cli"},
    "rich": {"cli"},
    "coincurve": {"zkevm"},
    "sha3": {"zkevm"},
    "google": {"zkevm"},
    "prometheus_client": {"metrics"},
    "pyarrow": {"arrow", "spark"},
    "pyspark": {"spark"},
    "fastavro": {"reassembly"},
    "matplotlib": {"spark"},
    "obstore": {"storage"},
}
# Bytes in, events out: these parts do no input or output, read no clock and write no log.
SANS_IO = {
    *("errors", "format", "position", "printable", "selection", "_entry", "_run", "_codec"),
    *("_filtered", "_lines", "_packer", "_pages"),
    "protocol",
    "reassembly",
    "zkevm",
}
INPUT_OUTPUT = {
    *("asyncio", "builtins", "codecs", "datetime", "fcntl", "fileinput", "glob", "io", "logging"),
    *("mmap", "multiprocessing", "os", "pathlib", "random", "select", "selectors", "shutil"),
    *("signal", "socket", "ssl", "subprocess", "sys", "tempfile", "threading", "time"),
}
# Calls that need no import.
INPUT_OUTPUT_CALLS = {"open", "print", "input"}
CYTHON_CALL = re.compile(rf"(?<!def )(?<![.\w])({'|'.join(sorted(INPUT_OUTPUT_CALLS))})\(")
# What a part needs of these: the type of a path, and its text; those of a time.
MAY_NAME = {"errors": {"os"}, "selection": {"datetime"}}

CYTHON_IMPORT = re.compile(
    r"^[ \t]*(?:from[ \t]+(?P<base>[.\w]+)[ \t]+c?import[ \t]*(?P<names>\([^)]*\)|[^\n]*)"
    r"|c?import[ \t]+(?P<modules>[^\n]+))",
    re.MULTILINE,
)


@functools.cache
def nodes_of(source: str) -> list[ast.AST]:
    """The syntax tree of a module, flat. Several tests read all modules."""
    return list(ast.walk(ast.parse(source)))


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
            yield from self.in_python(nodes_of(source))

    def in_python(self, nodes: list[ast.AST]) -> Iterator[tuple[int, str]]:
        for node in nodes:
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
        if part in SANS_IO and top in INPUT_OUTPUT - MAY_NAME.get(part, set()):
            return f"{top} is input or output, a clock or a log"
        return ""
    imported = rest[0] if rest else ""
    if imported == part:
        return ""
    if imported not in LEVEL:
        return f"{module} is not a part of the package; import the name from its home"
    if LEVEL[imported] >= LEVEL[part]:
        return f"{imported} is not below {part}"
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
            broken.append(f"{where}: {importing.part} is in none of the layers")
            continue
        for line, module in importing.found():
            wrong = judge(root.name, importing.part, module)
            if wrong:
                broken.append(f"{where}:{line}: {wrong}")
        if importing.part in SANS_IO:
            broken += [f"{where}:{line}: {name}() is input or output" for line, name in calls(path)]
    return list(dict.fromkeys(broken))


def calls(path: Path) -> Iterator[tuple[int, str]]:
    """The calls of builtin functions that do input or output."""
    source = path.read_text()
    if path.suffix in (".pyx", ".pxd"):
        for match in CYTHON_CALL.finditer(source):
            yield source.count("\n", 0, match.start()) + 1, match[1]
        return
    for node in nodes_of(source):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name):
            continue
        if node.func.id in INPUT_OUTPUT_CALLS:
            yield node.lineno, node.func.id


class Modules:
    """The modules of a package, by dotted name, with what each imports and defines."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.files: dict[str, list[Path]] = {}
        for path in sorted(root.rglob("*")):
            if path.suffix in (".py", ".pyi", ".pyx", ".pxd"):
                name = ".".join(path.relative_to(root.parent).with_suffix("").parts)
                self.files.setdefault(name.removesuffix(".__init__"), []).append(path)

    def module_of(self, name: str) -> str:
        """The module that an imported dotted name leads to; "" if it is not of the package."""
        while name and name not in self.files:
            name = name.rpartition(".")[0]
        return name

    def imports(self) -> dict[str, set[str]]:
        """Which modules each imports; what a package's ``__init__`` offers is left out."""
        graph: dict[str, set[str]] = {name: set() for name in self.files}
        for name, paths in self.files.items():
            for path in paths:
                if path.name != "__init__.py":
                    found = Importing(self.root.name, path, self.root).found()
                    graph[name] |= {self.module_of(module) for _, module in found}
            graph[name] -= {name, ""}
        return graph

    def circles(self) -> list[list[str]]:
        """The groups of modules that import one another, directly or not."""
        graph = self.imports()
        reached: dict[str, set[str]] = {}
        for start in graph:
            seen: set[str] = set()
            waiting = [start]
            while waiting:
                new = graph[waiting.pop()] - seen
                seen |= new
                waiting += new
            reached[start] = seen
        groups = {
            tuple(sorted({other for other in reached[name] if name in reached[other]}))
            for name in graph
            if name in reached[name]
        }
        return [list(group) for group in sorted(groups)]

    def owners(self) -> dict[str, list[str]]:
        """The modules that define a class of a name, once for each definition, by the name."""
        owners: dict[str, list[str]] = {}
        for module, paths in self.files.items():
            for path in paths:
                source = path.read_text()
                if path.suffix == ".py":
                    nodes = nodes_of(source)
                    names = [node.name for node in nodes if isinstance(node, ast.ClassDef)]
                else:
                    names = CYTHON_CLASS.findall(source) if path.suffix == ".pyx" else []
                for name in names:
                    owners.setdefault(name, []).append(module)
        return owners

    def sizes(self) -> dict[str, int]:
        """How many modules each folder holds."""
        sizes: dict[str, set[str]] = {}
        for paths in self.files.values():
            for path in paths:
                if path.stem != "__init__" and path.suffix != ".pyi":
                    folder = path.parent.relative_to(self.root).as_posix()
                    sizes.setdefault(folder, set()).add(path.stem)
        return {folder: len(stems) for folder, stems in sizes.items()}


CYTHON_CLASS = re.compile(r"^\s*(?:cdef |cpdef )?class (\w+)", re.MULTILINE)


def test_every_import_goes_down() -> None:
    assert violations(ROOT) == []


def test_no_files_import_one_another() -> None:
    assert Modules(ROOT).circles() == []


def test_a_folder_holds_at_most_fifteen_modules() -> None:
    sizes = Modules(ROOT).sizes()
    assert {name: size for name, size in sizes.items() if size > 15 and name != "cli/verbs"} == {}


def test_a_class_name_has_one_owner() -> None:
    owners = Modules(ROOT).owners()
    assert {name: found for name, found in owners.items() if len(found) > 1} == {}


# What NamedTuple and other projects call by such names.
NOT_PRIVATE = {"_replace", "_asdict", "_fields", "_runtime_param", "_jsparkSession"}
OF_OTHERS = {"os", "SparkContext"}


def private_uses(root: Path) -> list[str]:
    """One line for each use of a private name that another part of the package defines."""
    defined: dict[str, set[str]] = {}
    uses: list[tuple[str, str, int, str]] = []
    for path in sorted(root.rglob("*.py*")):
        if path.suffix not in (".py", ".pyx", ".pxd"):
            continue
        where = path.relative_to(root)
        names = defined.setdefault(where.parts[0], set())
        if path.suffix != ".py":
            names |= set(re.findall(r"\b_\w+", path.read_text()))
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                names.add(node.name)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                names.add(node.id)
            elif isinstance(node, ast.Attribute) and re.match(r"_(?!_)", node.attr):
                owner = node.value.id if isinstance(node.value, ast.Name) else ""
                if isinstance(node.ctx, ast.Store) and owner == "self":
                    names.add(node.attr)
                elif owner not in OF_OTHERS | {"self", "cls"}:
                    uses.append((where.parts[0], where.as_posix(), node.lineno, node.attr))
    return [
        f"{where}:{line}: {name}"
        for part, where, line, name in uses
        if name not in defined[part] | NOT_PRIVATE and not where.endswith("_pb2.py")
    ]


def test_no_part_uses_the_private_names_of_another() -> None:
    assert private_uses(ROOT) == []


def test_finds_a_private_name_of_another_part(tmp_path: Path) -> None:
    files = {
        "storage/stream.py": "class Stream:\n  def __init__(self):\n    self._file = 1\n",
        "storage/parts.py": "def f(stream):\n  return stream._file\n",
        "server/server.py": "def f(stream):\n  return stream._file\n",
    }
    assert private_uses(toy(tmp_path, files)) == ["server/server.py:2: _file"]


# Exchanges are written once: below, only drivers know how bytes and time are waited for.
ENGINES = ("client", "publisher", "consumer")
WAITS = {
    *("trio", "asyncio", "socket", "select", "selectors", "signal", "ssl", "threading", "time"),
    *("anyio", "concurrent", "queue", "sched", "sniffio"),
}
DRIVER = re.compile(r"\w+_(driver|thread)")
ADAPTER = re.compile(r"(async|blocking|trio)_\w+")
# What others import of these, and why.
ALSO_KNOWN = {
    "client/async_client.py": {"ssl"},  # the type of an option, as below
    "client/blocking_client.py": {"ssl"},
    "client/bulk_receive.py": {"time"},  # a function for a thread, which an engine passes on
    "client/server_peer.py": {"threading"},  # the time limit of an answer
    "client/upstream.py": {"ssl"},
    "publisher/async_publisher.py": {"ssl"},
    "publisher/blocking_publisher.py": {"ssl"},
}


def waits(root: Path) -> list[str]:
    """One line for each import of an engine that only a driver may have."""
    broken = []
    for path in sorted(path for part in ENGINES for path in root.glob(f"{part}/*.py")):
        if DRIVER.fullmatch(path.stem):
            continue
        name = path.relative_to(root).as_posix()
        for line, module in Importing(root.name, path, root).found():
            top = module.split(".")[0]
            driver = any(DRIVER.fullmatch(word) for word in module.split(".")[1:-1])
            if top in WAITS - ALSO_KNOWN.get(name, set()):
                broken.append(f"{name}:{line}: {top} is for drivers")
            elif top == root.name and driver and not ADAPTER.fullmatch(path.stem):
                broken.append(f"{name}:{line}: {module} is a driver's")
    return broken


def test_an_engine_knows_no_driver() -> None:
    assert waits(ROOT) == []
    for name, modules in ALSO_KNOWN.items():
        found = Importing(ROOT.name, ROOT / name, ROOT).found()
        assert modules <= {module.split(".")[0] for _, module in found}, f"{name} needs fewer"


@pytest.mark.parametrize(
    "name, text",
    [
        ("client/base.py", "import trio"),
        ("client/base.py", "import time"),
        ("client/engine.py", "def f():\n  from asyncio import sleep"),
        ("client/engine.py", "from toy.client.trio_driver import TrioDriver"),
        ("client/blocking_client.py", "import socket"),
        ("consumer/engine.py", "import trio"),
        ("consumer/state.py", "import socket"),
        ("consumer/state.py", "import asyncio"),
        ("publisher/new.py", "import select"),
    ],
)
def test_finds_an_engine_that_waits(tmp_path: Path, name: str, text: str) -> None:
    clean = {
        "client/trio_driver.py": "import time\nimport trio\n",
        "client/bulk_receive.py": "import time\n",
        "client/blocking_client.py": "import ssl\nfrom toy.client.thread_driver import Thread\n",
        "consumer/trio_reassembly.py": "from toy.client.trio_driver import TrioDriver\n",
    }
    assert waits(toy(tmp_path, clean)) == []
    assert len(waits(toy(tmp_path, {**clean, name: text}))) == 1


MOST_SHARED = 10
"""The most statements that two modules of engines and drivers may have in common."""


def statements(path: Path) -> Counter[str]:
    """The first lines of the statements of a module's functions, without async and await.

    Functions of up to three statements are left out, and statements of a keyword alone: two
    adapters of one engine have these in common.
    """
    found: Counter[str] = Counter()
    for function in nodes_of(path.read_text()):
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            inside = [node for node in ast.walk(function) if isinstance(node, ast.stmt)]
            texts = [ast.unparse(it) for it in inside if it is not function and not is_string(it)]
            lines = [re.sub("await |async ", "", text).split("\n")[0] for text in texts]
            if len(lines) > 3:
                found.update(line for line in lines if "(" in line or "=" in line)
    return found


def is_string(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def twins(root: Path) -> list[tuple[str, str]]:
    paths = sorted(path for part in ENGINES for path in root.glob(f"{part}/*.py"))
    found = {path.relative_to(root).as_posix(): statements(path) for path in paths}
    return [
        (one, other)
        for one, other in combinations(found, 2)
        if (found[one] & found[other]).total() > MOST_SHARED
    ]


def test_no_file_has_a_twin() -> None:
    assert twins(ROOT) == []


def test_finds_a_twin(tmp_path: Path) -> None:
    lines = "".join(f"    x = await self.step({number})\n" for number in range(MOST_SHARED + 1))
    files = {
        "client/trio_work.py": f'async def work(self):\n    """One."""\n{lines}',
        "client/thread_work.py": f"def other(self):\n{lines}".replace("await ", ""),
        "consumer/engine.py": "def other(self):\n    x = self.step(1)\n" * 20,
    }
    assert twins(toy(tmp_path, files)) == [("client/thread_work.py", "client/trio_work.py")]


def test_the_codec_keeps_its_place() -> None:
    assert (ROOT / "_codec.pyx").exists()


def test_reads_the_whole_package() -> None:
    parts = {path.relative_to(ROOT).parts[0].split(".")[0] for path in ROOT.rglob("*.py*")}
    assert {"errors", "format", "_codec", "_packer", "storage", "protocol", "cli"} <= parts
    assert {"transport", "client", "server", "publisher", "relay", "consumer"} <= parts
    assert {"service", "reassembly", "zkevm", "arrow", "spark"} <= parts


CLEAN = {
    "__init__.py": "from typing import TYPE_CHECKING as T\nif T:\n from toy.server import x\n",
    "errors.py": "",
    "format.py": "import struct\n",
    "_codec.pyx": "from libc.string cimport memcpy\ncimport cython\nfrom toy.errors import A\n",
    "_codec.pyi": "from toy.errors import A\n",
    "storage/__init__.py": "",
    "storage/file.py": "import lmdb, os\nfrom .. import format\nfrom . import page\n",
    "storage/page.py": "from .._codec import scan\nfrom toy._version import VERSION\n",
    "protocol/server.py": "from toy.errors import A\n",
    "server/server.py": "import trio\nfrom toy.storage.file import F\nfrom toy.protocol import x\n",
    "cli/main.py": "import typer\nfrom toy.server import server\nfrom importlib import metadata\n",
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
        ("errors.py", "from toy.format import x", "1: format is not below errors"),
        ("storage/a.py", "import toy.server.server", "1: server is not below storage"),
        ("storage/a.py", "from toy import server", "1: server is not below storage"),
        ("storage/a.py", "from .. import server", "1: server is not below storage"),
        ("storage/a.py", "from ..server import session", "1: server is not below storage"),
        ("storage/b/a.py", "from ...server import session", "1: server is not below storage"),
        ("storage/a.py", "import toy.protocol", "1: protocol is not below storage"),
        ("protocol/a.py", "from toy.storage import f", "1: storage is not below protocol"),
        ("server/a.py", "def f():\n  from toy import cli", "2: cli is not below server"),
        ("server/a.py", "import importlib as i\ni.import_module('toy.cli')", "2: cli is not"),
        ("server/a.py", "from toy.http import x", "1: http is not below server"),
        ("storage/a.py", "from toy.arrow import x", "1: arrow is not below storage"),
        (
            "protocol/a.py",
            "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n  from toy.server import S",
            "3: server is not below protocol",
        ),
        ("cli/a.py", "import trio", "1: trio is for client"),
        ("cli/a.py", "from trio.abc import Stream", "1: trio is for client"),
        ("server/a.py", "import lmdb", "1: lmdb is for storage"),
        ("protocol/a.py", "import socket", "1: socket is input or output"),
        ("protocol/a.pyi", "import time", "1: time is input or output"),
        ("protocol/a.py", "import os", "1: os is input or output"),
        ("protocol/a.py", "x = open('/etc/hosts')", "1: open() is input or output"),
        ("reassembly/a.py", "from pathlib import Path", "1: pathlib is input or output"),
        ("_codec.pyx", "def f():\n    print(open)", "2: print() is input or output"),
        ("server/a.py", "from toy import DataStream", "1: toy.DataStream is not a part"),
        ("server/a.py", "import toy", "1: toy is not a part"),
        ("helpers.py", "", " helpers is in none of the layers"),
        ("_codec.pyx", "from toy.storage cimport f", "1: storage is not below _codec"),
        ("_codec.pyx", "\ncimport toy.server", "2: server is not below _codec"),
        ("_codec.pyx", "cdef f():\n    import trio", "2: trio is for client"),
        (
            "storage/c.pyx",
            "from .. import (  # why\n  format,\n  server)",
            "1: server is not below",
        ),
        ("storage/c.pyx", "from toy.server cimport a, b, c", "1: server is not below"),
        ("storage/c.pxd", "from toy.protocol cimport x", "1: protocol is not below"),
    ],
)
def test_finds_a_violation(tmp_path: Path, name: str, text: str, message: str) -> None:
    found = violations(toy(tmp_path, {**CLEAN, name: text}))
    assert len(found) == 1
    assert found[0].startswith(f"toy/{name}:{message}")


def test_finds_circles_owners_and_sizes(tmp_path: Path) -> None:
    files = {
        **CLEAN,
        "storage/a.py": (
            "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n  from . import b\n"
        ),
        "storage/b.py": "from toy.storage import c\nclass One: ...\n",
        "storage/c.py": "from .a import x\nclass One: ...\nclass Two: ...\n",
        "server/_fast.pyx": "cdef class Two:\n    pass\n",
        "errors.py": "class Three: ...\nclass Three: ...\n",
    }
    found = Modules(toy(tmp_path, files))
    assert found.circles() == [["toy.storage.a", "toy.storage.b", "toy.storage.c"]]
    shared = {name for name, modules in found.owners().items() if len(modules) > 1}
    assert shared == {"One", "Two", "Three"}
    assert found.sizes()["storage"] == 5
