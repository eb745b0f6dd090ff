"""Addresses on the command line: which SOURCE is a server, and the servers that options name.

Owns the rule that distinguishes servers from files. The syntax is `transport.address`'s.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import typer

from datastreamer.archive import is_archive
from datastreamer.cli.commands.contexts import read_contexts
from datastreamer.cli.shared.exit_codes import Failure
from datastreamer.errors import ConnectFailed, UsageError
from datastreamer.transport.address import UNIX, Address, has_syntax, parse_address

if TYPE_CHECKING:
    from datastreamer.archive.peer import ArchivePeer


def server_address(text: str) -> Address | None:
    """The server that a SOURCE names; None if it names a file.

    A path that exists, one with a slash, and a name that ends in .bin are files; so is an archive.
    """
    if os.path.lexists(text) or is_archive(text):
        return None
    if not text.startswith(UNIX) and "://" not in text:
        if "/" in text or text.endswith(".bin"):
            return None
        if "," in text:
            raise Failure(f"{text}: no such file, and this reads a single server")
        if not has_syntax(text):
            raise Failure(
                f"{text}: no such file, and not HOST:PORT; write an IPv6 address as [::1]:6900"
            )
    return address_of(text)


def server_addresses(text: str) -> list[Address]:
    """The servers of one stream that a SOURCE names, separated by commas; none if it names a file.

    Raises `typer.BadParameter`.
    """
    if os.path.lexists(text) or is_archive(text):
        return []
    found = [server_address(part.strip()) for part in text.split(",")]
    servers = [address for address in found if address is not None]
    if servers and len(servers) < len(found):
        raise typer.BadParameter(f"{text}: name one file, or servers of one stream")
    return servers


@contextlib.contextmanager
def both_readings(*sources: str) -> Iterator[None]:
    """Where a server is not reached whose name may have been meant as a file's, say so."""
    try:
        yield
    except ConnectFailed as error:
        for text in sources:
            if ":" not in text and f"{text}:" in str(error):
                hint = ""
                if text in read_contexts():
                    hint = f"; to use the context of this name, write --context {text}"
                raise Failure(f"{text}: no such file, and no server: {error}{hint}") from None
        raise


def address_of(text: str, option: str | None = None) -> Address:
    """The server that a text names. Raises `typer.BadParameter`."""
    try:
        return parse_address(text)
    except UsageError as error:
        raise typer.BadParameter(f"{option}: {error}" if option else str(error)) from None


def sources_of(option: str, texts: Sequence[str]) -> tuple[list[Address], list[ArchivePeer]]:
    """The servers and the archives that an option names, each once."""
    archives = [text for text in dict.fromkeys(texts) if is_archive(text)]
    if archives:
        from datastreamer.archive.peer import ArchivePeer
    servers = [text for text in texts if text not in archives]
    return addresses_of(option, servers), [ArchivePeer(text) for text in archives]


def addresses_of(option: str, texts: Sequence[str]) -> list[Address]:
    """The servers that an option names, each once."""
    return list(dict.fromkeys(address_of(text, option) for text in texts))
