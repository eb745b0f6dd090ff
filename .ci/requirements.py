#!/usr/bin/env python3
"""Requirements that pyproject.toml names, one a line, for pip.

.ci/requirements.py build     what compiles the modules: setuptools, Cython
.ci/requirements.py oldest    constraints: the oldest version that each requirement of a user allows
"""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path

PROJECT = tomllib.loads((Path(__file__).parent.parent / "pyproject.toml").read_text())


def oldest() -> set[str]:
    """What the package and its extras allow; tools of `dev` alone keep their newest versions."""
    extras = dict(PROJECT["project"]["optional-dependencies"])
    del extras["dev"]
    lines = [*PROJECT["project"]["dependencies"], *(line for each in extras.values() for line in each)]
    found: dict[str, list[tuple[int, ...]]] = {}
    for line in lines:
        name, version = re.match(r"([\w-]+)(?:\[.*\])?>=([\d.]+)", line).groups()
        found.setdefault(name, []).append(tuple(map(int, version.split("."))))
    return {f"{name}=={'.'.join(map(str, max(versions)))}" for name, versions in found.items()}


if __name__ == "__main__":
    kind = sys.argv[1]
    print(*(sorted(oldest()) if kind == "oldest" else PROJECT["build-system"]["requires"]), sep="\n")
