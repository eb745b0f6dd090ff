"""Requirements of pyproject.toml, one a line, for pip.

.ci/requirements.py build     what a build needs
.ci/requirements.py EXTRA     what the extra of this name needs, without the package
.ci/requirements.py oldest    the oldest version that the package and its extras allow of each
"""

from __future__ import annotations

import re
import sys
import tomllib
from collections.abc import Iterable
from pathlib import Path

PROJECT = tomllib.loads((Path(__file__).parent.parent / "pyproject.toml").read_text())
EXTRAS = PROJECT["project"]["optional-dependencies"]
TOOLS = {"dev", "docs", "wheels"}


def oldest() -> set[str]:
    groups = [EXTRAS[name] for name in EXTRAS if name not in TOOLS]
    lines = [*PROJECT["project"]["dependencies"], *(line for group in groups for line in group)]
    return {re.sub(r">=([\d.]+).*", r"==\1", line) for line in lines}


def requirements(name: str) -> Iterable[str]:
    if name == "oldest":
        return oldest()
    lines: list[str] = PROJECT["build-system"]["requires"] if name == "build" else EXTRAS[name]
    return lines


print(*sorted(requirements(sys.argv[1])), sep="\n")
