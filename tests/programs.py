"""Programs that some tests run, and how to get them."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Final

import pytest

ROOT: Final = Path(__file__).resolve().parent.parent
HOW_TO_GET: Final = {
    "caddy": "install Caddy (apt-get install caddy)",
    "cc": "install a C compiler (apt-get install gcc)",
    "chromium": "install Chromium (apt-get install chromium)",
    "curl": "install curl (apt-get install curl)",
    "fish": "install fish (apt-get install fish)",
    "go": "install Go 1.21 or later (https://go.dev/dl)",
    "nginx": "install nginx (apt-get install nginx)",
    "node": "install Node.js 20 or later (apt-get install nodejs)",
    "openapi-python-client": "install it apart, as it needs another typer (pipx install ...)",
    "promtool": "install Prometheus (apt-get install prometheus)",
    "setsid": "install util-linux (apt-get install util-linux)",
    "systemd-analyze": "install systemd (apt-get install systemd)",
    "zsh": "install zsh (apt-get install zsh)",
}


def missing(program: str) -> str:
    """Why `program` cannot be run and how to get it; "" if it can be run."""
    if shutil.which(program):
        return ""
    return f"{program} is not on PATH: {HOW_TO_GET[program]}"


def npm_package(name: str) -> Path:
    """The folder of a package for node, or a skipped test."""
    for folder in (os.environ.get("NODE_PATH", ""), str(ROOT / "node_modules")):
        if folder and (Path(folder) / name).is_dir():
            return Path(folder) / name
    pytest.skip(
        f"{name} is not installed: npm install it, and have NODE_PATH lead to its node_modules"
    )


def needs(program: str) -> pytest.MarkDecorator:
    """Skip tests if `program` is missing."""
    return pytest.mark.skipif(bool(missing(program)), reason=missing(program) or program)
