"""Requirements of pyproject.toml, one a line, for pip.

.ci/requirements.py build     what a build needs
.ci/requirements.py oldest    the oldest version that the package and its extras allow of each
"""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path

PROJECT = tomllib.loads((Path(__file__).parent.parent / "pyproject.toml").read_text())


def oldest() -> set[str]:
    extras = PROJECT["project"]["optional-dependencies"]
    groups = [extras[name] for name in extras if name != "dev"]
    lines = [*PROJECT["project"]["dependencies"], *(line for group in groups for line in group)]
    return {re.sub(r">=([\d.]+).*", r"==\1", line) for line in lines}


lines = oldest() if sys.argv[1:] == ["oldest"] else PROJECT["build-system"]["requires"]
print(*sorted(lines), sep="\n")
