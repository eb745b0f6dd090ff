"""Named contexts: servers with their TLS options, in one TOML file; and the servers seen before.

``[NAME]`` has `server` and options of commands under their names. A command that reads SOURCE takes
it from `--context NAME`. Without that option it takes the environment variable
DATASTREAMER_SERVER, or else the context that `current` names.
"""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
import tomllib
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import typer

from datastreamer.cli.shared.exit_codes import Failure

SERVER_VARIABLE = "DATASTREAMER_SERVER"
_MOST_SEEN = 50
# The key of the name of the current one.
_CURRENT = "current"

Context = Mapping[str, str | int]


def contexts_file() -> Path:
    return _home("XDG_CONFIG_HOME", ".config") / "contexts.toml"


def _home(variable: str, default: str) -> Path:
    return Path(os.environ.get(variable) or Path.home() / default) / "datastreamer"


def _read() -> dict[str, Any]:
    path = contexts_file()
    try:
        found = tomllib.loads(path.read_text())
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise Failure(f"{path}: cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise Failure(f"{path}: not TOML: {error}") from None
    for name, context in found.items():
        named = isinstance(context, dict) and isinstance(context.get("server"), str)
        if not named and not (name == _CURRENT and isinstance(context, str)):
            raise Failure(f"{path}: [{name}] has no server")
    return found


def read_contexts() -> dict[str, Context]:
    """The contexts by name; none without a file. Raises `Failure`."""
    return {name: each for name, each in _read().items() if not isinstance(each, str)}


def current_context() -> str | None:
    """The name of the context for commands without a SOURCE. Raises `Failure`."""
    found = _read()
    name = found.get(_CURRENT)
    return name if isinstance(name, str) and name in found else None


def write_contexts(contexts: Mapping[str, Context], current: str | None = None) -> None:
    """Replace the file; `current` is the current context from now on (None: as before). Raises
    `Failure`."""
    name = current or current_context() or ""
    lines = [f"{_CURRENT} = {_toml(name)}", ""] if name in contexts else []
    for name, context in sorted(contexts.items()):
        lines += [f"[{_toml(name)}]", *(f"{k} = {_toml(v)}" for k, v in context.items())]
    _replace(contexts_file(), "\n".join([*lines, ""]))


def _toml(value: str | int) -> str:
    """A string of JSON is one of TOML, but for one character."""
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def _replace(path: Path, text: str) -> None:
    try:
        data = text.encode()
    except UnicodeEncodeError:
        raise Failure(f"{path}: what is to be written is not UTF-8; use another name") from None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
            file.write(data)
        os.replace(file.name, path)
    except OSError as error:
        raise Failure(f"{path}: cannot be written: {error.strerror}") from None


def context_of(name: str) -> Context:
    """The context of this name. Raises `typer.BadParameter` if there is none."""
    contexts = read_contexts()
    if name not in contexts:
        raise typer.BadParameter(f"there is no context {name!r}{did_you_mean(name, contexts)}")
    return contexts[name]


def did_you_mean(name: str, known: Sequence[str] | Mapping[str, Any]) -> str:
    """The end of an error about an unknown name."""
    longer = [each for each in known if each.endswith(f"-{name}")]
    close = longer or get_close_matches(name, list(known), 1)
    return f"; did you mean {close[0]!r}?" if close else ""


# Servers seen before, for the completion of SOURCE.


def _seen_file() -> Path:
    return _home("XDG_STATE_HOME", ".local/state") / "servers"


def seen_servers() -> list[str]:
    """The servers that commands on a terminal have connected to, the last one first."""
    try:
        return _seen_file().read_text().split()
    except OSError:
        return []


def remember_server(address: str) -> None:
    """Note a server that was connected to; without a home, or a place there, nothing is noted."""
    seen = seen_servers()
    if seen[:1] != [address]:
        rest = [each for each in seen if each != address]
        with contextlib.suppress(Failure):
            _replace(_seen_file(), "\n".join([address, *rest][:_MOST_SEEN]))
