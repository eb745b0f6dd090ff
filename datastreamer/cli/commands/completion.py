"""Completion: what may follow the words of a command line, and the scripts that shells load.

A script calls the program with the line in the environment variable of `VARIABLE`; each line that
it prints is a word, a tab and its help, or `FILES`: names of files may follow as well.
"""

from __future__ import annotations

import inspect
import os
import re
import shlex
import typing
from collections.abc import Iterator, Mapping
from typing import Any, Literal, get_args, get_origin

import typer

from datastreamer.cli.commands.building import verb
from datastreamer.cli.commands.contexts import SERVER_VARIABLE, read_contexts, seen_servers
from datastreamer.cli.commands.groups import Commands

VARIABLE = "_DATASTREAMER_COMPLETE"
FILES = ":files"

SCRIPTS = {
    "bash": r"""_datastreamer() {
    local line="${COMP_LINE:0:COMP_POINT}" word="${COMP_LINE:0:COMP_POINT}" found
    word="${word##*[[:space:]]}"
    # bash splits words at colons: it replaces only what follows the last one.
    local before=""; [[ $COMP_WORDBREAKS == *:* && $word == *:* ]] && before="${word%:*}:"
    COMPREPLY=()
    while IFS= read -r found; do
        if [[ $found == :files ]]; then
            compopt -o filenames 2>/dev/null
            while IFS= read -r found; do COMPREPLY+=("$found"); done < <(compgen -f -- "$word")
        else
            found="${found%%$'\t'*}"
            COMPREPLY+=("${found#"$before"}")
        fi
    done < <(_DATASTREAMER_COMPLETE="$line" "$1" 2>/dev/null)
}
complete -F _datastreamer datastreamer
""",
    "zsh": r"""#compdef datastreamer
_datastreamer() {
    local -a found
    local line files=0
    while IFS= read -r line; do
        if [[ $line == :files ]]; then
            files=1
        else
            found+=("${${line%%$'\t'*}//:/\\:}:${line#*$'\t'}")
        fi
    done < <(_DATASTREAMER_COMPLETE="${(j: :)words[1,CURRENT]}" "$words[1]" 2>/dev/null)
    (( $#found )) && _describe datastreamer found
    (( files )) && _files
}
compdef _datastreamer datastreamer
""",
    "fish": r"""function __datastreamer_complete
    for line in (_DATASTREAMER_COMPLETE=(commandline -cp | string collect) datastreamer 2>/dev/null)
        if test "$line" = ":files"
            __fish_complete_path (commandline -ct)
        else
            echo $line
        end
    end
end
complete -c datastreamer -f -a '(__datastreamer_complete)'
""",
}


def completions(line: str, commands: Commands) -> Iterator[str]:
    """What may take the place of the last word of `line`, which may be empty."""
    try:
        words = shlex.split(line)[1:]
    except ValueError:  # an open quote
        return
    word = "" if not words or line[-1:].isspace() else words.pop()
    for text, about in _candidates(words, word, commands):
        if text == FILES or text.startswith(word):
            yield text if text == FILES else f"{text}\t{about}"


def _candidates(words: list[str], word: str, commands: Commands) -> Iterator[tuple[str, str]]:
    while words and words[0].startswith("-"):
        # Options of the log.
        words = words[2:] if words[0] in ("--log-level", "--log-format") else words[1:]
    if not words:
        yield from commands.summaries.items()
        yield "--help", "Show the help"
        yield "--version", "Show the version"
        return
    name, *rest = words
    if name not in commands:
        return
    made = commands.made(name)
    if isinstance(made, typer.Typer):
        inner: Any = typer.main.get_command(made)
        yield from _candidates(rest, word, inner.commands)
    else:
        yield from _values(inspect.signature(verb(made)).parameters, rest, word)


def _values(
    parameters: Mapping[str, inspect.Parameter], words: list[str], word: str
) -> Iterator[tuple[str, str]]:
    """The values of the option that the last word is, or else options and arguments."""
    options: dict[str, tuple[Any, str, str | None]] = {}
    arguments: list[str] = []
    for name, parameter in parameters.items():
        hint, info = get_args(parameter.annotation)[:2]
        if isinstance(info, typer.models.OptionInfo):
            # Typer reads the first name from where the default would be.
            named = f"--{name.replace('_', '-')}" if info.default is ... else str(info.default)
            options[named] = hint, info.help or "", info.metavar
        else:
            arguments.append(name)
    if words and words[-1] in options and not _is_flag(options[words[-1]][0]):
        choices = [*_choices(options[words[-1]][0])]
        if words[-1] == "--context":
            choices = [*read_contexts()]
        elif options[words[-1]][2] == "HOST:PORT":
            choices = seen_servers()
        yield from ((choice, "") for choice in choices)
        if not choices:
            yield FILES, ""
        return
    if word.startswith("-"):
        for name, (_, about, _) in options.items():
            yield name, re.split(r"[;:.] |[.] ?$| \[", about)[0]
        yield "--help", "Show the help"
        return
    shells = parameters.get("shell")
    if shells is not None:
        yield from ((choice, "") for choice in _choices(get_args(shells.annotation)[0]))
        return
    if {"source", "sources", "server", "a", "b"} & {*arguments}:
        server = os.environ.get(SERVER_VARIABLE)
        for each in dict.fromkeys([*([server] if server else []), *seen_servers()]):
            yield each, "server"
    yield FILES, ""


def _is_flag(hint: Any) -> bool:
    return hint is bool or bool in get_args(hint)


def _choices(hint: Any) -> tuple[Any, ...]:
    for each in (hint, *get_args(hint)):
        if get_origin(each) is Literal:
            return typing.get_args(each)
    return ()
