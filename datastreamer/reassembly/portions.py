"""Which entries hold the messages of the portions that a consumer subscribes to.

A message is an entry's data: u16 length of its key, key, value. The key of a part begins with its
prefix, so the entries can be selected before anything of the payload is known.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from datastreamer.reassembly.producer import MESSAGE_TYPE
from datastreamer.selection.clauses import Where

NESTED: Final = b"\xff"
"""What the keys of nested headers begin with."""
_HEADER: Final = b"\x00"
_KEY_AT: Final = 2
_PREFIX_SIZE: Final = 33


def wanted(subscribe: Iterable[bytes], type: int = MESSAGE_TYPE) -> list[Where]:
    """The clauses that select the messages of these portions, for `where` of a client: the headers
    of all payloads, and the parts whose keys begin with one of the prefixes. They are entries of
    `type`."""
    keys = {_HEADER, *(bytes(prefix[:_PREFIX_SIZE]) for prefix in subscribe)}
    return [Where(type, _KEY_AT, key) if key else Where(type) for key in sorted(keys)]
