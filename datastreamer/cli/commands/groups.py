"""Programs whose commands are loaded when they are used: help that lists them loads none."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib import import_module
from typing import Any

import typer
from typer.core import TyperGroup

from datastreamer.cli.commands.classes import ProgramGroup, VerbCommand

Sections = Mapping[str, Mapping[str, str]]
"""The commands of a program, as its help lists them: name and summary, by the section's title. A
summary is the first line of the command's docstring."""


class Commands(Mapping[str, Any]):
    """The commands of a program by name, each loaded from its file in `folder`.

    A name in `modules` has its file there; all others are in a file of their name.
    """

    def __init__(
        self, folder: str, sections: Sections, modules: Mapping[str, str] | None = None
    ) -> None:
        self._folder = folder
        self.summaries = {name: it for section in sections.values() for name, it in section.items()}
        self._modules = modules or {}
        self._loaded: dict[str, Any] = {}

    def __getitem__(self, name: str) -> Any:
        if name not in self.summaries:
            raise KeyError(name)
        if name not in self._loaded:
            self._loaded[name] = _command(name, self.made(name))
        return self._loaded[name]

    def made(self, name: str) -> Any:
        """The function of a command, or the program of a group of commands."""
        own = name.replace("-", "_")
        return getattr(import_module(f"{self._folder}.{self._modules.get(name, own)}"), own)

    def __iter__(self) -> Iterator[str]:
        return iter(self.summaries)

    def __len__(self) -> int:
        return len(self.summaries)


def _command(name: str, made: Any) -> Any:
    from datastreamer.cli.commands.building import new_program, verb

    if not isinstance(made, typer.Typer):
        program = new_program("", {})
        program.command(name, cls=VerbCommand)(verb(made))
        made_program: Any = typer.main.get_command(program)
        return made_program.commands[name]
    group = typer.main.get_command(made)
    group.name = name
    return group


def group_class(
    folder: str, sections: Sections, modules: Mapping[str, str] | None = None
) -> type[TyperGroup]:
    """The class of a program with these commands."""

    class LazyGroup(ProgramGroup):
        def __init__(self, **attributes: Any) -> None:
            super().__init__(**attributes)
            self.commands: Any = Commands(folder, sections, modules)

        def format_commands(self, ctx: Any, formatter: Any) -> None:
            width = max(map(len, self.commands))
            for title, section in sections.items():
                with formatter.section(title):
                    formatter.write_dl(
                        [(name.ljust(width), text) for name, text in section.items()]
                    )

    return LazyGroup
