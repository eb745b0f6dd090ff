"""Help, error messages, log lines and documentation use plain technical English.

A short list of phrases stays out of them: each has a plainer word, which is named beside it.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from datastreamer.cli.dsapp.program import program as dsapp
from datastreamer.cli.program import program as datastreamer
from datastreamer.metrics.names import METRICS

ROOT = Path(__file__).resolve().parent.parent

# Phrase, as a regular expression, and what to write instead.
PHRASES = {
    r"told|tells?|telling": "report, notify, print, say which",
    r"stands?|standing|stood": "is, is stored",
    r"whoever": "a client that ...",
    r"so (many|much|long|often)": "at most N, for N seconds, every N seconds",
    r"(is|are|be) let in": "is accepted",
    r"for sure|for the sake of|for good": "certainly, so that, permanently",
    r"nobody|everybody|somebody|anybody": "no client, every client, a client",
    r"(is|are|was|were) gone": "is removed, is closed, no longer exists",
    r"goes? on|going on|went on": "continue, resume",
    r"made up|made-up": "demo, generated",
    r"and, or": "also",
    r"behind the (end|head|file)": "after the end, lagging",
    r"cut back|taken back|takes? back": "truncate",
    r"all the same": "nevertheless",
    r"(?<!there )is no (hex|JSON|TOML|event|entry|stream|number|server)": "is not a ...",
}
BANNED = {re.compile(rf"\b({phrase})\b", re.IGNORECASE): use for phrase, use in PHRASES.items()}

# Calls whose string arguments a user reads, beside those of `raise` and of a logger.
SHOWN = {
    *("say", "say_error", "number_option", "fraction_option", "text_option"),
    *("Option", "Argument", "BadParameter"),
}
LOGGED = {"debug", "info", "warning", "error", "exception", "critical", "log"}

# Parts of the package, and documents, that are still to be rewritten.
PARTS_TO_DO: set[str] = set()
DOCUMENTS_TO_DO: set[str] = set()


def findings(text: str) -> list[str]:
    return [
        f"{found[0]!r} in {text!r}: write {use}"
        for phrase, use in BANNED.items()
        if (found := phrase.search(text))
    ]


def help_texts(command: Any, name: str) -> Iterator[tuple[str, str]]:
    yield name, command.help or ""
    for parameter in command.params:
        yield f"{name} {parameter.opts[0]}", getattr(parameter, "help", None) or ""
    for child in getattr(command, "commands", {}).values():
        yield from help_texts(child, f"{name} {child.name}")


@pytest.mark.parametrize("program", [datastreamer, dsapp], ids=["datastreamer", "dsapp"])
def test_help(program: typer.Typer) -> None:
    texts = dict(help_texts(typer.main.get_command(program), "datastreamer"))
    assert len(texts) > 20
    assert {name: bad for name, text in texts.items() if (bad := findings(text))} == {}


def test_metrics() -> None:
    assert {name: bad for name, it in METRICS.items() if (bad := findings(it.help))} == {}


def messages(path: Path) -> Iterator[str]:
    """The string literals in a source file that are raised, logged or shown."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Raise) and node.exc is not None:
            yield from literals(node.exc)
        elif isinstance(node, ast.Call):
            function = node.func
            if isinstance(function, ast.Attribute):
                logs = function.attr in LOGGED and "log" in ast.unparse(function.value)
                if logs or function.attr in SHOWN:
                    yield from literals(node)
            elif isinstance(function, ast.Name) and function.id in SHOWN:
                yield from literals(node)


def literals(node: ast.AST) -> Iterator[str]:
    """Its strings; the fields of an f-string are left out."""
    for child in ast.walk(node):
        if isinstance(child, ast.JoinedStr):
            parts = [it.value if isinstance(it, ast.Constant) else "..." for it in child.values]
            yield "".join(map(str, parts))
        elif isinstance(child, ast.Constant) and isinstance(child.value, str):
            yield child.value


PACKAGE = ROOT / "datastreamer"
PARTS = sorted({path.relative_to(PACKAGE).parts[0] for path in PACKAGE.rglob("*.py")})


@pytest.mark.parametrize("part", [part for part in PARTS if part not in PARTS_TO_DO])
def test_messages(part: str) -> None:
    folder = PACKAGE / part
    found = {
        f"{path.relative_to(PACKAGE)}": bad
        for path in ([folder] if folder.is_file() else sorted(folder.rglob("*.py")))
        if (bad := [line for text in messages(path) for line in findings(text)])
    }
    assert found == {}


DOCUMENTS = [
    *sorted(path.relative_to(ROOT).as_posix() for path in ROOT.glob("docs/*.md")),
    *("README.md", "CONTRIBUTING.md", "SECURITY.md"),
]


@pytest.mark.parametrize("name", [name for name in DOCUMENTS if name not in DOCUMENTS_TO_DO])
def test_documents(name: str) -> None:
    paragraphs = re.split(r"\n\s*\n", (ROOT / name).read_text())
    found = [bad for text in paragraphs for bad in findings(" ".join(text.split()))]
    assert found == []


def test_finds_a_phrase(tmp_path: Path) -> None:
    path = tmp_path / "bad.py"
    path.write_text('_log.info("%s was told", x)\nraise E(f"{x}: nobody has it")\ny = "told"\n')
    found = [line for text in messages(path) for line in findings(text)]
    assert sorted({line.split(" in ")[0] for line in found}) == ["'nobody'", "'told'"]
