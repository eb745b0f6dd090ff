"""Help, messages, docstrings, comments and documentation use plain technical English.

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
    r"what becomes of": "how ... is handled",
    r"by chance|of its own accord": "say what happens",
    r"once more": "again, one more time",
    r"(?<!holds )(?<!to )no stream file": "not a stream file",
    r"(?<!there )is no (hex|JSON|TOML|event|entry|stream|number|server)": "is not a ...",
    r"(?<!there )is no (time|transaction|URL|chain)": "is not a ...",
}
BANNED = {re.compile(rf"\b({phrase})\b", re.IGNORECASE): use for phrase, use in PHRASES.items()}


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


def texts(path: Path) -> Iterator[str]:
    """What a source file says: strings of more than one word, docstrings and comments.

    A Cython source is one text.
    """
    source = path.read_text()
    if path.suffix not in (".py", ".pyi"):
        yield plain(source)
        return
    tree = ast.parse(source)
    joined = [node for node in ast.walk(tree) if isinstance(node, ast.JoinedStr)]
    inside = {id(part) for node in joined for part in node.values}
    for node in joined:
        # The fields of an f-string are left out.
        parts = [it.value if isinstance(it, ast.Constant) else "..." for it in node.values]
        yield plain("".join(map(str, parts)))
    for node in ast.walk(tree):
        if not isinstance(node, ast.Constant) or id(node) in inside:
            continue
        if isinstance(node.value, str) and " " in node.value:
            yield plain(node.value)
    yield from map(plain, COMMENTS.findall(source))


COMMENTS = re.compile(r"(?:^[ \t]*#[^\n]*\n)+|(?<=  )# [^\n]*", re.MULTILINE)


def plain(text: str) -> str:
    """On one line, without comment signs."""
    return " ".join(re.sub(r"^[ \t]*#[:!]?", "", text, flags=re.MULTILINE).split())


PACKAGE = ROOT / "datastreamer"
SOURCES = sorted(
    path
    for path in PACKAGE.rglob("*")
    if path.suffix in (".py", ".pyi", ".pyx", ".pxd", ".h") and "_pb2" not in path.name
)
PARTS = sorted({path.relative_to(PACKAGE).parts[0] for path in SOURCES})


@pytest.mark.parametrize("part", PARTS)
def test_sources(part: str) -> None:
    found = {
        f"{path.relative_to(PACKAGE)}": bad
        for path in SOURCES
        if path.relative_to(PACKAGE).parts[0] == part
        if (bad := [line for text in texts(path) for line in findings(text)])
    }
    assert found == {}


DOCUMENTS = [
    *sorted(path.relative_to(ROOT).as_posix() for path in ROOT.glob("docs/*.md")),
    *("README.md", "CONTRIBUTING.md", "SECURITY.md"),
]


@pytest.mark.parametrize("name", DOCUMENTS)
def test_documents(name: str) -> None:
    paragraphs = re.split(r"\n\s*\n", (ROOT / name).read_text())
    found = [bad for text in paragraphs for bad in findings(" ".join(text.split()))]
    assert found == []


def test_finds_a_phrase(tmp_path: Path) -> None:
    path = tmp_path / "bad.py"
    path.write_text(
        '"""The byte stands."""\n_log.info("%s was told", x)\nraise E(f"{x}: nobody has it")\n'
        "y = 'it goes' ' on'  # whoever asks\n# that is cut\n# back\nstanding = 'standing'\n"
    )
    compiled = tmp_path / "bad.pyx"
    compiled.write_text("# all the\n# same\nraise E('it is gone')\n")
    found = [line for file in (path, compiled) for text in texts(file) for line in findings(text)]
    assert sorted(line.split(" in ")[0] for line in found) == [
        *("'all the same'", "'cut back'", "'goes on'", "'is gone'"),
        *("'nobody'", "'stands'", "'told'", "'whoever'"),
    ]
