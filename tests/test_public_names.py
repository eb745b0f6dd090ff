"""The public names: complete, documented, and the only ones that the documentation uses.

Public is what `__all__` of the packages below names. The documentation and the examples may go no
deeper, in programs and in sentences.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import datastreamer.aio

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = [
    "datastreamer",
    *(
        f"datastreamer.{name}"
        for name in ("aio", "arrow", "errors", "reassembly", "spark", "zkevm")
    ),
]
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md", "bench/README.md")),
    *(page for folder in ("docs", "contrib", "examples") for page in (ROOT / folder).rglob("*.md")),
]
# Classes that Spark loads.
JAVA = {f"datastreamer.spark.{path.stem}" for path in (ROOT / "jvm").rglob("Catalog.java")}
EXAMPLES = sorted((ROOT / "examples").rglob("*.py"))

BLOCK = re.compile(r"^( *)```python\n(.*?)^ *```", re.MULTILINE | re.DOTALL)
DOTTED = re.compile(r"(?<![\w./-])datastreamer(?:\.[A-Za-z_]\w*)+")
# The systemd unit and the like.
FILE_SUFFIXES = {"service", "socket", "json", "toml", "rules", "yml"}


def imported(source: str) -> Iterator[str]:
    """The dotted names that a program imports from this project."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def deeper(names: Iterator[str]) -> list[str]:
    """Those of the names that are not public."""
    found = []
    for name in names:
        if name.split(".")[0] != "datastreamer" or name in {*PACKAGES, *JAVA}:
            continue
        package = max((p for p in PACKAGES if name.startswith(f"{p}.")), key=len)
        if name[len(package) + 1 :].split(".")[0] not in importlib.import_module(package).__all__:
            found.append(name)
    return found


def named(text: str) -> Iterator[str]:
    """What a page names: in its text, and in the imports of its Python blocks."""
    for name in DOTTED.findall(text):
        if name.split(".")[-1] not in FILE_SUFFIXES:
            yield name
    for indent, block in BLOCK.findall(text):
        yield from imported(re.sub(f"^{indent}", "", block, flags=re.MULTILINE))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_pages_use_public_names(page: Path) -> None:
    assert deeper(named(page.read_text())) == []


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: str(path.relative_to(ROOT)))
def test_examples_use_public_names(example: Path) -> None:
    text = example.read_text()
    assert deeper(named(text)) == []
    assert deeper(imported(text)) == []


@pytest.mark.parametrize("package", PACKAGES)
def test_every_public_name_has_a_docstring(package: str) -> None:
    module = importlib.import_module(package)
    assert len(set(module.__all__)) == len(module.__all__)
    values = {name: getattr(module, name) for name in module.__all__}
    lacking = [
        name
        for name, value in values.items()
        if (inspect.isclass(value) or inspect.isroutine(value)) and not value.__doc__
    ]
    assert lacking == []
    members = [
        f"{name}.{member}"
        for name, value in values.items()
        if inspect.isclass(value) and value.__module__.startswith("datastreamer")
        if not getattr(value, "_is_protocol", False)
        for member, found in vars(value).items()
        if not member.startswith("_")
        and (isinstance(found, property) or inspect.isroutine(getattr(value, member)))
        and not inspect.getdoc(getattr(value, member))
    ]
    assert members == []


@pytest.mark.parametrize("package", PACKAGES)
def test_every_public_name_has_a_signature(package: str) -> None:
    """Also compiled classes: `help` and editors show how to call them."""
    module = importlib.import_module(package)
    for name in module.__all__:
        value = getattr(module, name)
        if inspect.isroutine(value) or (inspect.isclass(value) and not _is_error(value)):
            inspect.signature(value)
            assert "--\n" not in (value.__doc__ or "")


def _is_error(value: type) -> bool:
    return issubclass(value, BaseException)


@pytest.mark.parametrize(
    "owner",
    [
        datastreamer.Client,
        datastreamer.BlockingClient,
        datastreamer.aio.Batches,
        datastreamer.aio.Entries,
    ],
)
def test_members_are_documented(owner: type) -> None:
    """What only our own parts use is not public on a class that users hold."""
    words = {word for page in PAGES for word in re.findall(r"\w+", page.read_text())}
    assert {name for name in dir(owner) if not name.startswith("_")} <= words


@pytest.mark.parametrize("package", PACKAGES)
def test_type_checkers_see_the_same_names(package: str) -> None:
    """What is loaded when first used is also imported under TYPE_CHECKING, and nothing else is.
    Both name the same module."""
    module = importlib.import_module(package)
    tree = ast.parse(Path(inspect.getfile(module)).read_text())
    imports = [
        (node.module, alias)
        for block in tree.body
        if isinstance(block, ast.If) and ast.unparse(block.test) == "TYPE_CHECKING"
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
        if alias.asname is not None
    ]
    for home, alias in imports:
        there = importlib.import_module(str(home))
        its = getattr(there, alias.name, None) or importlib.import_module(f"{home}.{alias.name}")
        assert getattr(module, str(alias.asname)) is its, alias.asname
    typed = {alias.asname for _, alias in imports}
    defined = set(vars(module)) - typed
    assert typed <= set(module.__all__)
    assert set(module.__all__) - typed <= defined


def test_finds_deeper_names() -> None:
    page = (
        "`datastreamer.DataStream.open` `datastreamer.storage.stream` `datastreamer.service`\n"
        "`help(datastreamer.server.server)`, datastreamer.net.scrape; contrib/datastreamer.x,\n"
        "and `raise datastreamer.errors.UsageError`, but not `datastreamer.errors.os`.\n"
        "```python\nfrom datastreamer import connect\nfrom datastreamer.client import trio\n```\n"
        "- item\n  ```python\n  import datastreamer.arrow, datastreamer.server.server\n  ```\n"
    )
    assert set(deeper(named(page))) == {
        "datastreamer.client",
        "datastreamer.client.trio",
        "datastreamer.errors.os",
        "datastreamer.net.scrape",
        "datastreamer.server.server",
        "datastreamer.storage.stream",
    }
