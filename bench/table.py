"""Prints the rows of a benchmark run as one table.

``table.py FIGURES``: pytest-benchmark's JSON, with the rows that ``bench/conftest.py``
put into it. A ratio is above 1 where ours is the better one.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text


def figure(value: float | None) -> str:
    """Three digits that count: 14.2 M, 448 k, 0.125."""
    if value is None:
        return "-"
    for size, letter in ((1e9, " G"), (1e6, " M"), (1e3, " k")):
        if abs(value) >= size:
            return f"{_three(value / size)}{letter}"
    return _three(value)


def _three(value: float) -> str:
    digits = 0 if abs(value) >= 100 else 1 if abs(value) >= 10 else 2 if abs(value) >= 1 else 3
    return f"{value:.{digits}f}"


def rows_of(figures: dict[str, Any]) -> list[dict[str, Any]]:
    return [row for run in figures["benchmarks"] for row in run["extra_info"].get("rows", [])]


def missed(row: dict[str, Any]) -> bool:
    """Whether the row falls short of what it promises."""
    return None not in (row["ratio"], row["at_least"]) and row["ratio"] < row["at_least"]


def table_of(rows: list[dict[str, Any]]) -> Table:
    table = Table(header_style="bold")
    for title in ("work", "ours", "rival or limit, same run", "", "unit", "ratio", "promised"):
        right = title in ("ours", "", "ratio", "promised")
        table.add_column(title, justify="right" if right else "left", no_wrap=right)
    last = ""
    for row in rows:
        again = row["work"] == last
        last = row["work"]
        style = "red" if missed(row) else "green" if row["at_least"] and row["ratio"] else ""
        table.add_row(
            "" if again else row["work"],
            "" if again else figure(row["ours"]),
            row["rival_name"] + ("" if row["rival"] or not row["rival_name"] else " (not here)"),
            figure(row["rival"]) if row["rival_name"] else "",
            row["unit"],
            Text(f"{_three(row['ratio'])} x" if row["ratio"] else "-", style=style),
            f"{row['at_least']:g} x" if row["at_least"] else "",
        )
    return table


def main() -> int:
    if len(sys.argv) != 2:
        print("usage: table.py FIGURES.json", file=sys.stderr)
        return 2
    figures = json.loads(Path(sys.argv[1]).read_text())
    rows = rows_of(figures)
    machine = figures["machine_info"]
    console = Console()
    if not console.is_terminal:
        console.width = 140
    console.print(table_of(rows))
    short = [row for row in rows if missed(row)]
    console.print(
        f"{machine['system']} {machine['release']}, {machine['cpu'].get('brand_raw', '?')}, "
        f"{machine['cpu'].get('count', '?')} cores, Python {machine['python_version']}. "
        "Ratio: above 1, ours is better; medians, ours and rival in turn in one run."
    )
    if short:
        console.print(f"{len(short)} below what they promise.", style="red")
    return 0


if __name__ == "__main__":
    sys.exit(main())
