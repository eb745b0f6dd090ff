"""Prints the rows of benchmark runs as one table.

``table.py [--page] FIGURES...``: pytest-benchmark's JSON, with the rows that
``bench/conftest.py`` put into it. A ratio is above 1 where ours is the better one. Of a row that
several runs have, it prints the medians. With ``--page`` it prints ``docs/BENCHMARKS.md``.
"""

from __future__ import annotations

import argparse
import json
import statistics
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


def rows_of(runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows of all runs, in their order; one, with the medians, of those that are the same."""
    same: dict[tuple[str, str, str], list[dict[str, Any]]] = {}
    for figures in runs:
        for run in figures["benchmarks"]:
            for row in run["extra_info"].get("rows", []):
                same.setdefault((row["work"], row["rival_name"], row["unit"]), []).append(row)
    return [
        rows[-1] | {name: _median(rows, name) for name in ("ours", "rival", "ratio")}
        for rows in same.values()
    ]


def _median(rows: list[dict[str, Any]], name: str) -> float | None:
    figures = [row[name] for row in rows if row[name] is not None]
    return statistics.median(figures) if figures else None


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


PAGE = """# Benchmarks

What this table shows was measured on {date}: {machine}

<!-- needs: a checkout, and some minutes on an idle machine -->
```sh
make bench BENCH="{files}"
```

Each row compares two things measured in turn in one run: ours, and a rival or a limit. The
reference is the Go implementation; its rows need `go`. A ratio above 1 means that ours is better,
for every unit; figures are medians{runs}.
A machine drifts by a quarter within minutes, and an idle one may take twice as long to wake a
thread as some minutes before, so only ratios are meaningful. *Promised* is the ratio that we want
to reach; a ratio below it is printed in bold.
[bench/README.md](../bench/README.md) says how to measure your machine.

| work | ours | rival or limit | | unit | ratio | promised |
|---|--:|---|--:|---|--:|--:|
"""


def page_of(runs: list[dict[str, Any]]) -> str:
    """The page of these runs in Markdown."""
    files = dict.fromkeys(
        run["fullname"].partition("::")[0] for figures in runs for run in figures["benchmarks"]
    )
    lines = []
    for row in rows_of(runs):
        ratio = f"{_three(row['ratio'])} x" if row["ratio"] else "-"
        cells = [
            row["work"],
            figure(row["ours"]),
            row["rival_name"],
            figure(row["rival"]) if row["rival_name"] else "",
            row["unit"],
            f"**{ratio}**" if missed(row) else ratio,
            f"{row['at_least']:g} x" if row["at_least"] else "",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    date = max(figures["datetime"] for figures in runs)[:10]
    several = f" of up to {len(runs)} runs" if len(runs) > 1 else ""
    page = PAGE.format(date=date, machine=machine_of(runs[0]), files=" ".join(files), runs=several)
    return page + "\n".join(lines)


def machine_of(figures: dict[str, Any]) -> str:
    machine = figures["machine_info"]
    return (
        f"{machine['system']} {machine['release']}, {machine['cpu'].get('brand_raw', '?')}, "
        f"{machine['cpu'].get('count', '?')} cores, Python {machine['python_version']}."
    )


def main() -> int:
    words = argparse.ArgumentParser()
    words.add_argument("figures", type=Path, nargs="+")
    words.add_argument("--page", action="store_true")
    given = words.parse_args()
    runs = [json.loads(path.read_text()) for path in given.figures]
    if given.page:
        print(page_of(runs))
        return 0
    rows = rows_of(runs)
    console = Console()
    if not console.is_terminal:
        console.width = 140
    console.print(table_of(rows))
    short = [row for row in rows if missed(row)]
    console.print(
        f"{machine_of(runs[0])} "
        "Ratio: above 1, ours is better; medians, ours and rival in turn in one run."
    )
    if short:
        console.print(f"{len(short)} below what they promise.", style="red")
    return 0


if __name__ == "__main__":
    sys.exit(main())
