"""The events of streams of version 1, in fixed binary layouts.

Owns how an event becomes bytes and back; all integers are big-endian. The layouts changed over
time: StartL2Block has four, two other events have two, and the length distinguishes them. A field
that a layout lacks is None, and an event is packed in the layout whose fields it has. Fields are
named as in the protobuf messages.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from datastreamer.zkevm.events import BookMark, BookmarkType
from datastreamer.zkevm.schema import TYPE_BOOK_MARK

if TYPE_CHECKING:
    from datastreamer.zkevm.transactions import OpenedTransaction

TYPE_START_L2_BLOCK: Final = 1
TYPE_L2_TX: Final = 2
TYPE_END_L2_BLOCK: Final = 3
TYPE_UPDATE_GER: Final = 4

_START_FIRST: Final = struct.Struct(">QQQ32s20sH")
_START_INFO_ROOT: Final = struct.Struct(">QQQ32s32s32s20sH")
_START_L1: Final = struct.Struct(">QQQ32s32s20sH")
_START: Final = struct.Struct(">QQQII32s32s20sHI")
_TX: Final = struct.Struct(">BB32sI")
_TX_FIRST: Final = struct.Struct(">BBI")
_END: Final = struct.Struct(">Q32s32s")
_GER: Final = struct.Struct(">QQ32s20sHI32s")
_GER_FIRST: Final = struct.Struct(">QQ32s20sH32s")
_MARK: Final = struct.Struct(">BQ")

_ADDRESSES: Final = frozenset({"coinbase"})
_HASHES: Final = frozenset(
    {"l1_blockhash", "l1_info_root", "global_exit_root", "hash", "state_root"}
)


class Generation(NamedTuple):
    """A layout of an event: its values and their names.

    With a `tail`, the layout ends with the number of bytes of that field, which follow it.
    """

    layout: struct.Struct
    fields: tuple[str, ...]
    tail: str | None = None


_HEAD: Final = ("batch_number", "number", "timestamp")
_ROOT: Final = ("global_exit_root", "coinbase", "fork_id")
_FLAGS: Final = ("effective_gas_price_percentage", "is_valid")
_UPDATE: Final = ("batch_number", "timestamp", *_ROOT)
GENERATIONS: Final[dict[int, tuple[Generation, ...]]] = {
    TYPE_START_L2_BLOCK: (
        Generation(
            _START,
            (
                *_HEAD,
                *("delta_timestamp", "l1_infotree_index", "l1_blockhash"),
                *(*_ROOT, "chain_id"),
            ),
        ),
        Generation(_START_L1, (*_HEAD, "l1_blockhash", *_ROOT)),
        Generation(
            _START_INFO_ROOT,
            (*_HEAD, "l1_blockhash", "global_exit_root", "l1_info_root", "coinbase", "fork_id"),
        ),
        Generation(_START_FIRST, (*_HEAD, *_ROOT)),
    ),
    TYPE_L2_TX: (
        Generation(_TX, (*_FLAGS, "state_root"), "encoded"),
        Generation(_TX_FIRST, _FLAGS, "encoded"),
    ),
    TYPE_END_L2_BLOCK: (Generation(_END, ("number", "hash", "state_root")),),
    TYPE_UPDATE_GER: (
        Generation(_GER, (*_UPDATE, "chain_id", "state_root")),
        Generation(_GER_FIRST, (*_UPDATE, "state_root")),
    ),
    TYPE_BOOK_MARK: (Generation(_MARK, ("type", "value")),),
}
"""The layouts of each entry type; data has the first one that it fits."""

_MARKS: Final = {0: BookmarkType.L2_BLOCK, 1: BookmarkType.BATCH}
_KINDS: Final = {kind: number for number, kind in _MARKS.items()}


class StartL2Block(NamedTuple):
    """The beginning of a block. Timestamps are in seconds; hashes have 32 bytes, addresses 20."""

    batch_number: int
    number: int
    timestamp: int
    delta_timestamp: int | None
    l1_infotree_index: int | None
    l1_blockhash: bytes | None
    global_exit_root: bytes
    coinbase: bytes
    fork_id: int
    chain_id: int | None
    l1_info_root: bytes | None = None

    def pack(self) -> bytes:
        """Encode the event in the layout that has the fields that are not None.

        Raises `ValueError` if no layout has these fields or a value does not fit.
        """
        return _pack_fields(self, TYPE_START_L2_BLOCK)

    @classmethod
    def unpack(cls, data: bytes) -> StartL2Block:
        """Decode any layout. Raises `ValueError`."""
        if len(data) == _START.size:  # the newest layout, in half the time
            return cls(*_START.unpack(data))
        return cls._make(_unpack_fields(cls._fields, TYPE_START_L2_BLOCK, data))


class L2Tx(NamedTuple):
    """A transaction; `encoded` is its RLP.

    `effective_gas_price_percentage` is in 255ths. `state_root` is None before 22 December 2023,
    which introduced it.
    """

    effective_gas_price_percentage: int
    is_valid: bool
    state_root: bytes | None
    encoded: bytes

    def pack(self) -> bytes:
        """Encode the event. Raises `ValueError` if a value does not fit."""
        flags = self.effective_gas_price_percentage, int(self.is_valid)
        if self.state_root is None:
            return _pack(self, _TX_FIRST, *flags, len(self.encoded)) + self.encoded
        root = _checked(self, "state_root")
        return _pack(self, _TX, *flags, root, len(self.encoded)) + self.encoded

    @classmethod
    def unpack(cls, data: bytes) -> L2Tx:
        """Decode either layout; if both fit, the newer one. Raises `ValueError`."""
        if len(data) >= _TX.size:
            percentage, valid, root, size = _TX.unpack_from(data)
            if len(data) == _TX.size + size:
                return cls(percentage, valid != 0, root, data[_TX.size :])
        if len(data) >= _TX_FIRST.size:
            percentage, valid, size = _TX_FIRST.unpack_from(data)
            if len(data) == _TX_FIRST.size + size:
                return cls(percentage, valid != 0, None, data[_TX_FIRST.size :])
        raise ValueError(f"{len(data)} bytes, which does not match its transaction's length")

    def open(self, *, sender: bool = True) -> OpenedTransaction:
        """Decode `encoded`, as `datastreamer.zkevm.open_transaction` does."""
        from datastreamer.zkevm.transactions import open_transaction

        return open_transaction(self.encoded, sender=sender)


class EndL2Block(NamedTuple):
    """The end of a block. Hashes have 32 bytes."""

    number: int
    hash: bytes
    state_root: bytes

    def pack(self) -> bytes:
        """Encode the event. Raises `ValueError` if a value does not fit."""
        return _pack_fields(self, TYPE_END_L2_BLOCK)

    @classmethod
    def unpack(cls, data: bytes) -> EndL2Block:
        """Decode the event. Raises `ValueError`."""
        if len(data) != _END.size:
            raise _bad_size(data, TYPE_END_L2_BLOCK)
        return cls(*_END.unpack(data))


class FixedUpdateGER(NamedTuple):
    """A new global exit root, between blocks. The older layout has no chain id."""

    batch_number: int
    timestamp: int
    global_exit_root: bytes
    coinbase: bytes
    fork_id: int
    chain_id: int | None
    state_root: bytes

    def pack(self) -> bytes:
        """Encode the event. Raises `ValueError` if a value does not fit."""
        return _pack_fields(self, TYPE_UPDATE_GER)

    @classmethod
    def unpack(cls, data: bytes) -> FixedUpdateGER:
        """Decode either layout. Raises `ValueError`."""
        return cls._make(_unpack_fields(cls._fields, TYPE_UPDATE_GER, data))


def pack_mark(mark: BookMark) -> bytes:
    """Encode a bookmark's key. Raises `ValueError` if version 1 has no such bookmark."""
    kind = _KINDS.get(BookmarkType(mark.type)) if mark.type in _KINDS else None
    if kind is None:
        raise ValueError(f"BookMark.type must be 1 (batch) or 2 (block), not {mark.type!r}")
    return _pack(mark, _MARK, kind, mark.value)


def unpack_mark(data: bytes) -> BookMark:
    """Decode a bookmark's key. Raises `ValueError`."""
    if len(data) != _MARK.size:
        raise _bad_size(data, TYPE_BOOK_MARK)
    kind, value = _MARK.unpack(data)
    if kind not in _MARKS:
        raise ValueError(f"its kind is {kind}, neither 0 (a block) nor 1 (a batch)")
    return BookMark(_MARKS[kind], value)


def _pack_fields(event: Any, type: int) -> bytes:
    """Encode an event in the layout that has the fields that are not None."""
    here = {name for name, value in zip(event._fields, event, strict=True) if value is not None}
    for layout, fields, _ in GENERATIONS[type]:
        if here == set(fields):
            return _pack(event, layout, *(_checked(event, name) for name in fields))
    raise ValueError(f"no layout of {event.__class__.__name__} has exactly these fields")


def _unpack_fields(names: tuple[str, ...], type: int, data: bytes) -> Iterator[Any]:
    """The values of these fields in the layout of this size; None for one that it lacks."""
    for layout, fields, _ in GENERATIONS[type]:
        if len(data) == layout.size:
            found = dict(zip(fields, layout.unpack(data), strict=True))
            return map(found.get, names)
    raise _bad_size(data, type)


def _bad_size(data: bytes, type: int) -> ValueError:
    sizes = sorted(layout.size for layout, *_ in GENERATIONS[type])
    which = "layout has" if len(sizes) == 1 else "layouts have"
    return ValueError(f"{len(data)} bytes, but the {which} {', '.join(map(str, sizes))}")


def _checked(event: Any, name: str) -> Any:
    """The value of a field. Raises `ValueError` for a hash or an address of another size."""
    value = getattr(event, name)
    size = 32 if name in _HASHES else 20 if name in _ADDRESSES else None
    if size is not None and (not isinstance(value, bytes) or len(value) != size):
        raise ValueError(f"{type(event).__name__}.{name} must be {size} bytes, not {value!r}")
    return value


def _pack(event: tuple[object, ...], layout: struct.Struct, *values: object) -> bytes:
    try:
        return layout.pack(*values)
    except struct.error as error:
        raise ValueError(f"{type(event).__name__}: {error}") from None
