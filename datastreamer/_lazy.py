"""What is loaded when it is first used: names of a package, and zstd."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from importlib import import_module
from typing import Any


def load_on_use(
    package: str, modules: Mapping[str, Sequence[str]]
) -> tuple[list[str], Callable[[str], Any], Callable[[], list[str]]]:
    """The names that `modules` of the package define, and the package's `__getattr__` and
    `__dir__`."""
    homes = {name: f"{package}.{module}" for module, names in modules.items() for name in names}
    loaded = vars(sys.modules[package])

    def load(name: str) -> Any:
        home = homes.get(name)
        if home is None:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        module = import_module(home)
        value = getattr(module, name, module)  # or the module itself is the name
        loaded[name] = value
        return value

    def listed() -> list[str]:
        return sorted({*loaded, *homes})

    return [*homes], load, listed


@cache
def zstd() -> Any:
    """The module ``compression.zstd`` of Python 3.14, or its backport; None without either."""
    for name in ("compression.zstd", "backports.zstd"):
        with contextlib.suppress(ImportError):
            return import_module(name)
    return None
