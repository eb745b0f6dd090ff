"""Requirements that pyproject.toml names, one a line, for pip.

.ci/requirements.py build     what compiles the modules
.ci/requirements.py oldest    constraints: the oldest version that each requirement of a user allows
"""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path

PROJECT = tomllib.loads((Path(__file__).parent.parent / "pyproject.toml").read_text())


def oldest() -> set[str]:
    """What the package and its extras allow; tools that `dev` alone names are left out."""
    extras = PROJECT["project"]["optional-dependencies"]
    groups = [extras[name] for name in extras if name != "dev"]
    found: dict[str, set[tuple[int, ...]]] = {}
    for line in [
        *PROJECT["project"]["dependencies"],
        *(each for group in groups for each in group),
    ]:
        name, version = re.match(r"([\w-]+)>=([\d.]+)", line).groups()
        found.setdefault(name, set()).add(tuple(map(int, version.split("."))))
    return {f"{name}=={'.'.join(map(str, max(versions)))}" for name, versions in found.items()}


if __name__ == "__main__":
    lines = oldest() if sys.argv[1] == "oldest" else PROJECT["build-system"]["requires"]
    print(*sorted(lines), sep="\n")
