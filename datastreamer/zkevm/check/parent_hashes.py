"""Checks that each block's hash follows from the hash of the previous block.

The stream does not carry a block's parent hash. But a block's hash is that of an Ethereum header,
and for a block without transactions every field of that header is known: it is rebuilt here with
the previous block's hash as the parent.

A header has a base fee from London on, which begins at a block, not with a fork id: a block's own
`base_fee` decides. An empty one is none, or zero. Nodes need not use such headers, so a fork's
blocks, with and without a base fee, are judged only once one of them has the expected hash.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final

from datastreamer.zkevm._rlp import rlp_bytes, rlp_list, rlp_number
from datastreamer.zkevm.events import L2Block

# The gas limit of a block that does not carry one (forks 8 and 9).
GAS_LIMIT: Final = 1 << 50

_NO_UNCLES: Final = bytes.fromhex(
    "a01dcc4de8dec75d7aab85b567b6ccd41ad312451b948a7413f0a142fd40d49347"
)
_NO_TRANSACTIONS: Final = bytes.fromhex(
    "a056e81f171bcc55a6ff8345e692c0f86e5b48e01b996cadc001622fb5e363b421"
)
_NO_LOGS: Final = b"\xb9\x01\x00" + bytes(256)
_TAIL: Final = b"\x80\xa0" + bytes(32) + b"\x88" + bytes(8)

# Blocks without the expected hash after which a fork is no longer checked.
_MOST_UNEXPECTED: Final = 64


def empty_headers(block: L2Block, parent: bytes) -> list[bytes]:
    """The RLP of the possible headers of a block without transactions; none if fields are
    missing."""
    if len(parent) != 32 or len(block.state_root) != 32 or len(block.coinbase) != 20:
        return []
    content = b"".join(
        [
            *(b"\xa0", parent, _NO_UNCLES, b"\x94", block.coinbase),
            *(b"\xa0", block.state_root, _NO_TRANSACTIONS, _NO_TRANSACTIONS, _NO_LOGS),
            *(b"\x80", rlp_number(block.number)),
            *(rlp_number(block.block_gas_limit or GAS_LIMIT), b"\x80"),
            *(rlp_number(block.timestamp), _TAIL),
        ]
    )
    fee = block.base_fee.lstrip(b"\0")
    london = rlp_list(content + rlp_bytes(fee))
    return [london] if fee else [rlp_list(content), london]


class _Fork:
    def __init__(self) -> None:
        self.confirmed = False
        self.compared = 0
        self.unexpected: list[tuple[int, L2Block, bytes]] = []


class ParentCheck:
    """Checks blocks in order; `add` returns those that do not follow from their parent."""

    def __init__(self, keccak: Callable[[bytes], bytes]) -> None:
        self._keccak = keccak
        self._forks: dict[tuple[int, bool], _Fork] = {}
        self.checked = 0

    def add(
        self, entry: int, block: L2Block, parent: bytes, fork: int
    ) -> Iterator[tuple[int, L2Block, bytes]]:
        """Check a block without transactions, in `entry`, that follows the block with the hash
        `parent`. Returns entry, block and parent of each block that does not match."""
        state = self._forks.setdefault((fork, bool(block.base_fee)), _Fork())
        if not state.confirmed and state.compared == _MOST_UNEXPECTED:
            return
        headers = empty_headers(block, parent)
        if not headers:
            return
        state.compared += 1
        if any(self._keccak(header) == block.hash for header in headers):
            self.checked += 1
            if not state.confirmed:
                state.confirmed = True
                self.checked += len(state.unexpected)
                yield from state.unexpected
                state.unexpected = []
        elif state.confirmed:
            self.checked += 1
            yield entry, block, parent
        else:
            state.unexpected.append((entry, block, parent))

    def unconfirmed(self) -> list[str]:
        """The forks of which no block, with or without a base fee, has had the expected hash."""
        return [
            f"fork {fork} with a base fee" if has_fee else f"fork {fork}"
            for (fork, has_fee), state in self._forks.items()
            if not state.confirmed
        ]
