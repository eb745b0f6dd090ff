"""Whether each block's hash follows from the block before it.

The stream does not carry a block's parent. The hash of a block is that of an Ethereum header,
though, and of a block without transactions every field of it is known: it is made again here
with the previous block's hash as the parent. Owns that header; knows no stream.

Nodes are not bound to such headers, so that a fork's blocks are judged only once one of them
has had the hash that is expected.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final

from datastreamer.zkevm.events import L2Block
from datastreamer.zkevm.rlp import rlp_list, rlp_number

# What a block may use where it does not say (forks 8 and 9).
GAS_LIMIT: Final = 1 << 50

_NO_UNCLES: Final = bytes.fromhex(
    "a01dcc4de8dec75d7aab85b567b6ccd41ad312451b948a7413f0a142fd40d49347"
)
_NO_TRANSACTIONS: Final = bytes.fromhex(
    "a056e81f171bcc55a6ff8345e692c0f86e5b48e01b996cadc001622fb5e363b421"
)
_NO_LOGS: Final = b"\xb9\x01\x00" + bytes(256)
_TAIL: Final = b"\x80\xa0" + bytes(32) + b"\x88" + bytes(8)

# So many blocks without the expected hash, and the fork's are not looked at any further.
_PATIENCE: Final = 64


def empty_header(block: L2Block, parent: bytes) -> bytes | None:
    """The RLP of the header of a block without transactions; None where fields lack."""
    if len(parent) != 32 or len(block.state_root) != 32 or len(block.coinbase) != 20:
        return None
    return rlp_list(
        b"".join(
            [
                *(b"\xa0", parent, _NO_UNCLES, b"\x94", block.coinbase),
                *(b"\xa0", block.state_root, _NO_TRANSACTIONS, _NO_TRANSACTIONS, _NO_LOGS),
                *(b"\x80", rlp_number(block.number)),
                *(rlp_number(block.block_gas_limit or GAS_LIMIT), b"\x80"),
                *(rlp_number(block.timestamp), _TAIL),
            ]
        )
    )


class _Fork:
    def __init__(self) -> None:
        self.proved = False
        self.looked_at = 0
        self.doubtful: list[tuple[int, L2Block, bytes]] = []


class Parents:
    """Looks at blocks in order; `add` gives those whose parent is another."""

    def __init__(self, keccak: Callable[[bytes], bytes]) -> None:
        self._keccak = keccak
        self._forks: dict[int, _Fork] = {}
        self.checked = 0

    def add(
        self, entry: int, block: L2Block, parent: bytes, fork: int
    ) -> Iterator[tuple[int, L2Block, bytes]]:
        """Look at a block without transactions, which stands in `entry` behind the one that
        has the hash `parent`. Gives entry, block and parent of each that does not follow."""
        state = self._forks.setdefault(fork, _Fork())
        if not state.proved and state.looked_at == _PATIENCE:
            return
        header = empty_header(block, parent)
        if header is None:
            return
        state.looked_at += 1
        if self._keccak(header) == block.hash:
            self.checked += 1
            if not state.proved:
                state.proved = True
                self.checked += len(state.doubtful)
                yield from state.doubtful
                state.doubtful = []
        elif state.proved:
            self.checked += 1
            yield entry, block, parent
        else:
            state.doubtful.append((entry, block, parent))

    def unproved(self) -> list[int]:
        """The forks none of whose blocks has had the hash that is expected."""
        return [fork for fork, state in self._forks.items() if not state.proved]
