"""The events of streams of version 1, in fixed binary layouts.

Owns how an event becomes bytes and back; all integers are big-endian. The layouts changed over
time: StartL2Block has four, two other events have two, and the length distinguishes them. A field
that a layout lacks is None, and an event is packed in the layout whose fields it has. Fields are
named as in the protobuf messages.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from datastreamer.zkevm.events import BookMark, BookmarkType
from datastreamer.zkevm.schema import TYPE_BOOK_MARK

if TYPE_CHECKING:
    from datastreamer.zkevm.transactions import OpenedTransaction

TYPE_START_L2_BLOCK: Final = 1
TYPE_L2_TX: Final = 2
TYPE_END_L2_BLOCK: Final = 3
TYPE_UPDATE_GER: Final = 4


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
            struct.Struct(">QQQII32s32s20sHI"),
            (*_HEAD, "delta_timestamp", "l1_infotree_index", "l1_blockhash", *_ROOT, "chain_id"),
        ),
        Generation(struct.Struct(">QQQ32s32s20sH"), (*_HEAD, "l1_blockhash", *_ROOT)),
        Generation(
            struct.Struct(">QQQ32s32s32s20sH"),
            (*_HEAD, "l1_blockhash", "global_exit_root", "l1_info_root", "coinbase", "fork_id"),
        ),
        Generation(struct.Struct(">QQQ32s20sH"), (*_HEAD, *_ROOT)),
    ),
    TYPE_L2_TX: (
        Generation(struct.Struct(">B?32sI"), (*_FLAGS, "state_root"), "encoded"),
        Generation(struct.Struct(">B?I"), _FLAGS, "encoded"),
    ),
    TYPE_END_L2_BLOCK: (Generation(struct.Struct(">Q32s32s"), ("number", "hash", "state_root")),),
    TYPE_UPDATE_GER: (
        Generation(struct.Struct(">QQ32s20sHI32s"), (*_UPDATE, "chain_id", "state_root")),
        Generation(struct.Struct(">QQ32s20sH32s"), (*_UPDATE, "state_root")),
    ),
    TYPE_BOOK_MARK: (Generation(struct.Struct(">BQ"), ("type", "value")),),
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


class L2Tx(NamedTuple):
    """A transaction; `encoded` is its RLP.

    `effective_gas_price_percentage` is in 255ths. `state_root` is None before 22 December 2023,
    which introduced it.
    """

    effective_gas_price_percentage: int
    is_valid: bool
    state_root: bytes | None
    encoded: bytes

    def open(self, *, sender: bool = True) -> OpenedTransaction:
        """Decode `encoded`, as `datastreamer.zkevm.open_transaction` does."""
        from datastreamer.zkevm.transactions import open_transaction

        return open_transaction(self.encoded, sender=sender)


class EndL2Block(NamedTuple):
    """The end of a block. Hashes have 32 bytes."""

    number: int
    hash: bytes
    state_root: bytes


class FixedUpdateGER(NamedTuple):
    """A new global exit root, between blocks. The older layout has no chain id."""

    batch_number: int
    timestamp: int
    global_exit_root: bytes
    coinbase: bytes
    fork_id: int
    chain_id: int | None
    state_root: bytes


class FixedCodec:
    """Reads and writes the events of one type, as a `MessageCodec` does."""

    def __init__(self, cls: type[Any], generations: tuple[Generation, ...]) -> None:
        self.cls = cls
        self.name = cls.__name__.removeprefix("Fixed")
        self._layouts = [
            (layout, names, tail, names == cls._fields[: len(names)])
            for layout, fields, tail in generations
            for names in [(*fields, tail) if tail else fields]
        ]

    def read(self, data: bytes) -> Any:
        """Decode any layout; if several fit, the newest. Raises `ValueError`."""
        size = len(data)
        for layout, names, tail, in_order in self._layouts:
            if tail is None:
                if size != layout.size:
                    continue
                values = layout.unpack(data)
            else:
                if size < layout.size:
                    continue
                values = layout.unpack_from(data)
                if size != layout.size + values[-1]:
                    continue
                values = (*values[:-1], data[layout.size :])
            if in_order:  # in half the time
                return self.cls(*values)
            found = dict(zip(names, values, strict=True))
            return self.cls(*map(found.get, self.cls._fields))
        if tail is not None:
            raise ValueError(f"{size} bytes, which does not match its transaction's length")
        sizes = sorted(layout.size for layout, *_ in self._layouts)
        which = "layout has" if len(sizes) == 1 else "layouts have"
        raise ValueError(f"{size} bytes, but the {which} {', '.join(map(str, sizes))}")

    def write(self, event: Any) -> bytes:
        """Encode an event in the layout that has the fields that are not None.

        Raises `ValueError` if no layout has these fields or a value does not fit.
        """
        here = {name for name, value in zip(event._fields, event, strict=True) if value is not None}
        for layout, names, tail, _ in self._layouts:
            if here == set(names):
                values = [_checked(event, name) for name in names]
                rest = b"" if tail is None else values[-1]
                if tail is not None:
                    values[-1] = len(rest)
                try:
                    return layout.pack(*values) + rest
                except struct.error as error:
                    raise ValueError(f"{type(event).__name__}: {error}") from None
        raise ValueError(f"no layout of {type(event).__name__} has exactly these fields")


class _MarkCodec(FixedCodec):
    def read(self, data: bytes) -> BookMark:
        kind, value = super().read(data)
        if kind not in _MARKS:
            raise ValueError(f"its kind is {kind}, neither 0 (a block) nor 1 (a batch)")
        return BookMark(_MARKS[kind], value)

    def write(self, event: BookMark) -> bytes:
        if event.type not in _KINDS:
            raise ValueError(f"BookMark.type must be 1 (batch) or 2 (block), not {event.type!r}")
        return super().write(BookMark(_KINDS[BookmarkType(event.type)], event.value))


CODECS: Final[dict[int, FixedCodec]] = {
    TYPE_BOOK_MARK: _MarkCodec(BookMark, GENERATIONS[TYPE_BOOK_MARK]),
    TYPE_START_L2_BLOCK: FixedCodec(StartL2Block, GENERATIONS[TYPE_START_L2_BLOCK]),
    TYPE_L2_TX: FixedCodec(L2Tx, GENERATIONS[TYPE_L2_TX]),
    TYPE_END_L2_BLOCK: FixedCodec(EndL2Block, GENERATIONS[TYPE_END_L2_BLOCK]),
    TYPE_UPDATE_GER: FixedCodec(FixedUpdateGER, GENERATIONS[TYPE_UPDATE_GER]),
}


def _checked(event: Any, name: str) -> Any:
    """The value of a field. Raises `ValueError` for a hash or an address of another size."""
    value = getattr(event, name)
    size = 32 if name in _HASHES else 20 if name in _ADDRESSES else None
    if size is not None and (not isinstance(value, bytes) or len(value) != size):
        raise ValueError(f"{type(event).__name__}.{name} must be {size} bytes, not {value!r}")
    if name == "is_valid" and value not in (0, 1):
        raise ValueError(f"{type(event).__name__}.is_valid must be 0 or 1, not {value!r}")
    return value
