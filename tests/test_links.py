"""What the pages name is there: every link to a file, or to a heading, leads somewhere."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("docs", "bench", "contrib", "examples")
PAGES = sorted(
    [*ROOT.glob("*.md"), *(page for name in FOLDERS for page in (ROOT / name).rglob("*.md"))]
)

LINK = re.compile(r"\]\(([^)\s]+)\)")
CODE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)


def links(page: Path) -> Iterator[str]:
    for target in LINK.findall(CODE.sub("", page.read_text())):
        if not re.match(r"[a-z]+:", target):
            yield target


def headings(page: Path) -> set[str]:
    """The page's anchors, as GitHub makes them."""
    found = re.findall(r"^#+ (.*)$", CODE.sub("", page.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in found}


def dead(page: Path) -> list[str]:
    found = []
    for link in links(page):
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        if not target.exists() or (anchor and anchor not in headings(target)):
            found.append(link)
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_leads_somewhere(page: Path) -> None:
    assert dead(page) == []


def test_the_readme_leads_to_every_page() -> None:
    """Also by the page of a folder, docs/NAME/README.md."""
    homes = [ROOT / "README.md", *(ROOT / "docs").glob("*/README.md")]
    linked = {(home.parent / link).resolve() for home in homes for link in links(home)}
    assert set((ROOT / "docs").rglob("*.md")) - linked == set()


def test_the_site_has_every_page() -> None:
    pages = {str(page.relative_to(ROOT / "docs")) for page in (ROOT / "docs").rglob("*.md")}
    navigation = (ROOT / "mkdocs.yml").read_text()
    assert {name for name in pages if f": {name}\n" not in navigation} == set()


def test_finds_what_leads_nowhere(tmp_path: Path) -> None:
    page = tmp_path / "PAGE.md"
    page.write_text(
        "# One, `two`\n[a](#one-two) [b](#two) [c](PAGE.md#one-two) [d](GONE.md)\n"
        "[e](https://example.invalid/x) [f](PAGE.md#three)\n```\n[g](GONE.md)\n```\n"
    )
    assert dead(page) == ["#two", "GONE.md", "PAGE.md#three"]
