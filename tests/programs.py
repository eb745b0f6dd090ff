"""Programs that some tests run, and how to get them."""

from __future__ import annotations

import shutil
from typing import Final

import pytest

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


def needs(program: str) -> pytest.MarkDecorator:
    """Skip tests if `program` is missing."""
    return pytest.mark.skipif(bool(missing(program)), reason=missing(program) or program)
