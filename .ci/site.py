"""Assemble the pages of the documentation site, or check the site that was built of them.

.ci/site.py pages FOLDER   the pages of docs/ and of the root, with links that work in the site, and
                           the reference, from the commands and the docstrings
.ci/site.py check FOLDER   raises if a page loads anything from another host
"""

from __future__ import annotations

import ast
import importlib
import inspect
import os
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer

from datastreamer.cli.dsapp.program import program as dsapp
from datastreamer.cli.program import program as datastreamer

ROOT = Path(__file__).resolve().parent.parent
PAGES = {
    ROOT / "README.md": "index.md",
    ROOT / "bench" / "README.md": "MEASURE.md",
    ROOT / "jvm" / "README.md": "JVM.md",
    **{ROOT / name: name for name in ("CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")},
    **{path: str(path.relative_to(ROOT / "docs")) for path in (ROOT / "docs").rglob("*.md")},
}
PACKAGES = ("", ".aio", ".errors", ".zkevm", ".arrow", ".spark", ".reassembly")
LINK = re.compile(r"\[([^\]]*)\]\(([^)\s#]*)(#[^)\s]*)?\)")
FENCE = re.compile(r"(^```.*?^```$)", re.MULTILINE | re.DOTALL)


def pages(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    made = {name: page(path, folder) for path, name in PAGES.items()}
    made["reference/COMMANDS.md"] = "# Commands\n\n" + "".join(
        "\n".join(commands(name, typer.main.get_command(each), None))
        for name, each in (("datastreamer", datastreamer), ("dsapp", dsapp))
    )
    made["reference/LIBRARY.md"] = "# Library\n\n" + "\n".join(
        line for package in PACKAGES for line in names_of(f"datastreamer{package}")
    )
    for name, text in made.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def page(path: Path, folder: Path) -> str:
    """A page of the checkout. Links to pages lead to those of the site, links to other files to
    copies of them, and links to folders become text."""
    here = Path(PAGES[path]).parent

    def link(found: re.Match[str]) -> str:
        text, target, anchor = found[1], found[2], found[3] or ""
        if not target or ":" in target:
            return found[0]
        at = (path.parent / target).resolve()
        if at.is_dir():
            return text
        if at not in PAGES:
            copy = folder / "files" / at.relative_to(ROOT)
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(at, copy)
        name = PAGES.get(at, f"files/{at.relative_to(ROOT)}")
        return f"[{text}]({os.path.relpath(name, here)}{anchor})"

    parts = FENCE.split(re.sub("^ *<!-- .* -->\n", "", path.read_text(), flags=re.MULTILINE))
    # What belongs to an item of a list is indented by four spaces here, by two on GitHub.
    parts[::2] = [
        re.sub("^  ", "    ", LINK.sub(link, part), flags=re.MULTILINE) for part in parts[::2]
    ]
    return "".join(parts)


def escaped(text: str) -> str:
    """A text for a cell of a table."""
    return re.sub(r"([|<*_\[\]])", r"\\\1", " ".join(text.split()))


def commands(name: str, command: Any, above: Any) -> Iterator[str]:
    """A command, its options, and the commands below it."""
    context = typer.Context(command, info_name=name.rpartition(" ")[2], parent=above)
    yield f"## {name}\n"
    yield f"{inspect.cleandoc(command.help or '')}\n"
    pieces = " ".join(command.collect_usage_pieces(context))
    yield f"```text\n{name} {pieces}\n```\n"
    rows = [row for each in command.get_params(context) if (row := each.get_help_record(context))]
    if rows:
        yield "| option | |\n|---|---|"
        yield from (
            f"| `{option.replace('|', chr(92) + '|')}` | {escaped(text)} |" for option, text in rows
        )
        yield ""
    if hasattr(command, "list_commands"):
        for below in command.list_commands(context):
            yield from commands(f"{name} {below}", command.get_command(context, below), context)


def names_of(package: str) -> Iterator[str]:
    """The public names of a package that are not those of `datastreamer` too."""
    module = importlib.import_module(package)
    yield f"## {package}\n\n{inspect.cleandoc(module.__doc__ or '')}\n"
    top = importlib.import_module("datastreamer")
    for name in sorted(module.__all__, key=str.lower):
        value = getattr(module, name)
        if module is not top and getattr(top, name, None) is value:
            continue
        if not (inspect.isclass(value) or inspect.isroutine(value)):
            continue
        yield from described(f"### {name}", name, value, value)
        if not inspect.isclass(value) or issubclass(value, BaseException):
            continue
        for member, found in sorted(vars(value).items()):
            if not member.startswith("_") and (doc := inspect.getdoc(getattr(value, member))):
                if isinstance(found, property) or type(found).__name__ == "getset_descriptor":
                    yield f"**`{member}`**\n\n{doc}\n"
                elif inspect.isroutine(getattr(value, member)):
                    yield from described("", member, getattr(value, member), value)


def described(heading: str, name: str, value: Any, owner: Any) -> Iterator[str]:
    shown = f"{name}{signature(name, value, owner)}"
    yield f"{heading}\n\n```python\n{shown}\n```\n" if heading else f"**`{shown}`**\n"
    yield f"{inspect.getdoc(value) or ''}\n"


def signature(name: str, value: Any, owner: Any) -> str:
    """The parameters of a function or class; of compiled ones as their stub has them."""
    try:
        return str(inspect.signature(value)).replace("'", "")
    except (TypeError, ValueError):
        pass
    module = owner.__module__
    stub = ROOT / f"{module.replace('.', '/')}.pyi"
    wanted = "__init__" if value is owner else name
    for node in ast.walk(ast.parse(stub.read_text() if stub.is_file() else "")):
        if isinstance(node, ast.ClassDef) and node.name == getattr(owner, "__name__", ""):
            for each in node.body:
                if isinstance(each, ast.FunctionDef) and each.name == wanted:
                    return f"({ast.unparse(each.args)})"
    return ""


def check(folder: Path) -> None:
    loaded = re.compile(r"<(?:script|link|img|iframe)\b[^>]*?(?:src|href)=\"?(https?://[^\" >]+)")
    found = {
        f"{path.relative_to(folder)}: {address}"
        for path in folder.rglob("*.html")
        for address in loaded.findall(path.read_text())
    }
    if found:
        raise SystemExit("\n".join(["loaded from elsewhere:", *sorted(found)]))


if __name__ == "__main__":
    {"pages": pages, "check": check}[sys.argv[1]](Path(sys.argv[2]))
