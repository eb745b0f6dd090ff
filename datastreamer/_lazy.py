"""Names of a package that are loaded when first used."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
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
