"""What docs/SPARK.md shows runs as it stands, and its table of options is the code's."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from datastreamer.spark.options import NAMES_OF_OPTIONS, read_options

ROOT = Path(__file__).resolve().parent.parent.parent
TEXT = (ROOT / "docs" / "SPARK.md").read_text()
FOLLOWING = (ROOT / "docs" / "SPARK_STREAMING.md").read_text()
EXAMPLES = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
TABLE = re.findall(r"^\| (`.*?) \| .* \| (.*?) ?\|$", TEXT, re.MULTILINE)


@pytest.mark.parametrize(
    "example, printed", [(0, ["11318"]), (1, ["100"])], ids=["blocks", "a range"]
)
def test_examples(
    example: int,
    printed: list[str],
    spark: Any,
    real_stream: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(real_stream.parent)
    # Python workers are in another folder.
    told = EXAMPLES[example].replace("stream.bin", str(real_stream))
    exec(compile(told, "docs/SPARK.md", "exec"), {})
    assert capsys.readouterr().out.split("\n")[0].split()[-1:] == printed


def test_the_options_are_those_of_the_code() -> None:
    told = set(re.findall(r"`(\w+)`", " ".join(names for names, _ in TABLE if "`" in names)))
    told -= {"FAILFAST", "PERMISSIVE", "DROPMALFORMED"}
    # Those that only queries without an end and writing have stand on their own page.
    others = set(NAMES_OF_OPTIONS) - told - {"paths", "file"}
    assert told <= set(NAMES_OF_OPTIONS)
    assert len(others) == 4
    assert {name for name in others if f"`{name}`" in FOLLOWING} == others


def test_the_defaults_are_those_of_the_code() -> None:
    told = {}
    for names, default in TABLE:
        for name in re.findall(r"`(\w+)`", names):
            if name in NAMES_OF_OPTIONS and default.strip("`") and default != "as above":
                told[name] = default.strip("`")
    assert len(told) == 10
    one = read_options({"server": "a:1"} | told)
    assert one == read_options({"server": "a:1"})
