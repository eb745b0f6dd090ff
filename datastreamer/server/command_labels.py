"""The labels under which a server counts its clients' commands: their names in `format`."""

from __future__ import annotations

from typing import Final

from datastreamer import format as wire
from datastreamer.protocol.commands import LAYOUTS, Authenticate

ENTRY: Final = "entry"
BOOKMARK: Final = "bookmark"
HEADER: Final = "header"
_NAMES: Final = {number: name for name, number in vars(wire).items() if name[:8] == "COMMAND_"}
# Of a command with two numbers the last name counts, as `LAYOUTS` has them.
KINDS: Final[dict[type, str]] = {
    kind: _NAMES[number].removeprefix("COMMAND_").lower()
    for number, (kind, _) in LAYOUTS.items()
    if kind is not Authenticate
}
PUBLISH: Final = "publish"
AUTHENTICATE: Final = "authenticate"
HTTP: Final = "http"
"""Label under which rejected tokens of HTTP requests are counted."""
COMMANDS: Final = tuple(KINDS.values())
"""Labels under which commands are counted; also `PUBLISH` and `AUTHENTICATE` if the server accepts
them."""
