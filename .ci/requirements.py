"""What pyproject.toml requires for a build, one requirement a line, for pip."""

import tomllib
from pathlib import Path

project = tomllib.loads((Path(__file__).parent.parent / "pyproject.toml").read_text())
print(*project["build-system"]["requires"], sep="\n")
