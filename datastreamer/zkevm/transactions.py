"""Decodes Ethereum transactions: the fields, the hash and the sender.

Owns the format of `Transaction.encoded`: legacy (with and without EIP-155), EIP-2930, EIP-1559,
EIP-4844 and EIP-7702, the latter four as they are or, as nodes write them, in an RLP string.
The packages of the extra ``zkevm`` supply Keccak and the curve; they are loaded at the first
transaction. Recovering the sender takes about three quarters of the time.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib import import_module
from typing import Any, Final, NamedTuple

from datastreamer.errors import DecodeFailed, ExtraMissing
from datastreamer.zkevm._rlp import (
    rlp_bytes,
    rlp_decode,
    rlp_fields,
    rlp_list,
    rlp_number,
    rlp_size,
)

LEGACY: Final = 0
ACCESS_LIST: Final = 1
DYNAMIC_FEE: Final = 2
BLOBS: Final = 3
SET_CODE: Final = 4

# The signature of a transaction that the network injected; no key can make it.
MARKER: Final = (0x05CA1AB1E0, 0x5CA1AB1E)

_FIRST_LIST: Final = 0xC0
_LEGACY: Final = ("nonce", "gas_price", "gas", "to", "value", "input", "v", "r", "s")
_FEES: Final = ("max_priority_fee_per_gas", "max_fee_per_gas")
_CALL: Final = ("gas", "to", "value", "input", "access_list")
# The fields between the nonce and the signature.
_FIELDS: Final = {
    ACCESS_LIST: ("gas_price", *_CALL),
    DYNAMIC_FEE: (*_FEES, *_CALL),
    BLOBS: (*_FEES, *_CALL, "max_fee_per_blob_gas", "blob_versioned_hashes"),
    SET_CODE: (*_FEES, *_CALL, "authorization_list"),
}
# What a transaction has that its type does not know.
_ABSENT: Final = {**dict.fromkeys(("gas_price", *_FEES)), "access_list": ()}
# The types whose `to` is required.
_CALLS: Final = (BLOBS, SET_CODE)
_FIRST_STRING: Final = 0x80
# What is signed of an authorization begins with this byte (EIP-7702).
_AUTHORIZATION: Final = b"\x05"
# Half the order of secp256k1.
_HIGHEST_S: Final = 0x7FFFFFFFFFFFFFFFFFFFFFFFFFFFFFFF5D576E7357A4501DDFE92F46681B20A0
_ADDRESS_SIZE: Final = 20
_KEY_SIZE: Final = 32


class AccessTuple(NamedTuple):
    """An entry of an access list: an account and keys of its storage."""

    address: bytes
    storage_keys: tuple[bytes, ...]


class Authorization(NamedTuple):
    """An account's permission to set its code to that of `address` (EIP-7702).

    `chain_id` 0 is any chain. `authority` is the account, None if it was not requested, if no key
    can make the signature, or if its `s` is in the upper half (EIP-2), which nodes refuse.
    """

    chain_id: int
    address: bytes
    nonce: int
    v: int
    r: int
    s: int
    authority: bytes | None


class OpenedTransaction(NamedTuple):
    """An Ethereum transaction; amounts in wei.

    `to` is None if it creates a contract. `chain_id` is None for a legacy transaction without one;
    fees that the type does not have are None. `v` is the parity for types 1 to 4. `sender` is None
    if it was not requested or does not exist: for an injected transaction, and for a signature that
    no key can make. `hash` is the transaction's, without the RLP string that may be around it.
    """

    type: int
    chain_id: int | None
    nonce: int
    gas_price: int | None
    max_priority_fee_per_gas: int | None
    max_fee_per_gas: int | None
    gas: int
    to: bytes | None
    value: int
    input: bytes
    access_list: tuple[AccessTuple, ...]
    v: int
    r: int
    s: int
    hash: bytes
    sender: bytes | None
    max_fee_per_blob_gas: int | None = None
    blob_versioned_hashes: tuple[bytes, ...] = ()
    authorization_list: tuple[Authorization, ...] = ()

    @property
    def is_injected(self) -> bool:
        """Whether it has the marker of an injected transaction as its signature."""
        return (self.r, self.s) == MARKER

    @property
    def contract(self) -> bytes | None:
        """The address of the contract that it creates; None without one or without a sender."""
        if self.to is not None or self.sender is None:
            return None
        made_by = rlp_list(rlp_bytes(self.sender) + rlp_number(self.nonce))
        return _tools().keccak(made_by)[-_ADDRESS_SIZE:]

    def as_json(self) -> dict[str, Any]:
        """The fields for JSON: bytes, `r` and `s` as 0x..."""
        return {name: _json(name, value) for name, value in self._asdict().items()}


def _json(name: str, value: Any) -> Any:
    if isinstance(value, bytes):
        return f"0x{value.hex()}"
    if name in ("r", "s"):
        return hex(value)
    if isinstance(value, AccessTuple | Authorization):
        return {name: _json(name, each) for name, each in value._asdict().items()}
    return [_json("", each) for each in value] if isinstance(value, tuple) else value


def open_transaction(encoded: bytes, *, sender: bool = True) -> OpenedTransaction:
    """Decode a transaction; several times as fast without `sender`, which is for the authorities of
    an authorization list, too.

    Raises `DecodeFailed` for bytes that are no such transaction, `ExtraMissing` if packages are
    not installed.
    """
    tools = _tools()
    if encoded[:1] and _FIRST_STRING <= encoded[0] < _FIRST_LIST:
        encoded = _decoded(encoded)
        if not encoded or encoded[0] not in _FIELDS:
            raise DecodeFailed(None, "not a transaction: an RLP string without one in it")
    kind = encoded[0] if encoded and encoded[0] < _FIRST_LIST else LEGACY
    if (kind != LEGACY and kind not in _FIELDS) or encoded[:1] == b"\0":
        first = encoded[:1].hex()
        raise DecodeFailed(None, f"not a transaction: unknown type, it begins with 0x{first}")
    content = encoded if kind == LEGACY else encoded[1:]
    items = _decoded(content)
    names = _LEGACY if kind == LEGACY else ("chain_id", "nonce", *_FIELDS[kind], "v", "r", "s")
    if not isinstance(items, list) or len(items) != len(names):
        found = f"a list of {len(items)} items" if isinstance(items, list) else "no list"
        raise DecodeFailed(None, f"not a transaction: {found}, but {len(names)} items are expected")
    fields = rlp_fields(names, items, _KINDS)
    v, r, s = fields["v"], fields["r"], fields["s"]
    parity, chain_id = v, fields.get("chain_id")
    if kind == LEGACY:
        chain_id, parity = _legacy_chain(v)
    if kind in _CALLS and not fields["to"]:
        raise DecodeFailed(None, f"not a transaction: to is empty, which type {kind} cannot be")
    signer = None
    if sender and (r, s) != MARKER:
        signer = _signer(_signed(kind, content, items, chain_id), parity, r, s)
    if sender and "authorization_list" in fields:
        authorizations = fields["authorization_list"]
        fields["authorization_list"] = tuple(map(_with_authority, authorizations))
    return OpenedTransaction(
        **{
            **_ABSENT,
            **fields,
            "type": kind,
            "chain_id": chain_id,
            "to": fields["to"] or None,
            "hash": tools.keccak(encoded),
            "sender": signer,
        }
    )


def wrapped(encoded: bytes) -> bytes:
    """A transaction as nodes write it: with a type, in an RLP string."""
    return rlp_bytes(encoded) if encoded[:1] and encoded[0] in _FIELDS else encoded


def _decoded(encoded: bytes) -> Any:
    try:
        return rlp_decode(encoded)
    except ValueError as error:
        raise DecodeFailed(None, f"not a transaction: {error}") from None


def _signer(payload: bytes, parity: int, r: int, s: int) -> bytes | None:
    """The account that signed `payload`; None if no key can have."""
    if parity not in (0, 1):
        return None
    tools = _tools()
    signature = r.to_bytes(32, "big") + s.to_bytes(32, "big") + bytes([parity])
    return tools.recover(signature, tools.keccak(payload))


def _with_authority(of: Authorization) -> Authorization:
    signed = rlp_number(of.chain_id) + rlp_bytes(of.address) + rlp_number(of.nonce)
    payload = _AUTHORIZATION + rlp_list(signed)
    signer = None if of.s > _HIGHEST_S else _signer(payload, of.v, of.r, of.s)
    return of._replace(authority=signer)


def _bytes(name: str, sizes: tuple[int, ...] = ()) -> Callable[[Any], bytes]:
    """Reads bytes of one of these sizes; none: of any."""

    def read(item: Any) -> bytes:
        if not isinstance(item, bytes):
            raise DecodeFailed(None, f"not a transaction: {name} is a list")
        if sizes and len(item) not in sizes:
            wanted = "20 or none" if sizes[1:] else "20"
            raise DecodeFailed(
                None, f"not a transaction: {name} is {len(item)} bytes, not {wanted}"
            )
        return item

    return read


def _access_list(item: Any) -> tuple[AccessTuple, ...]:
    found = []
    for pair in item if isinstance(item, list) else [item]:
        if not isinstance(pair, list) or len(pair) != 2:
            raise DecodeFailed(None, "not a transaction: its access list is not a list of pairs")
        address, keys = pair
        if (
            not isinstance(address, bytes)
            or len(address) != _ADDRESS_SIZE
            or not isinstance(keys, list)
            or not all(isinstance(key, bytes) and len(key) == _KEY_SIZE for key in keys)
        ):
            raise DecodeFailed(
                None,
                "not a transaction: its access list needs addresses of 20 and keys of 32 bytes",
            )
        found.append(AccessTuple(address, tuple(keys)))
    return tuple(found)


def _blob_hashes(item: Any) -> tuple[bytes, ...]:
    for each in item if isinstance(item, list) else [None]:
        if not isinstance(each, bytes) or len(each) != _KEY_SIZE:
            raise DecodeFailed(None, "not a transaction: it needs a list of hashes of 32 bytes")
    return tuple(item)


def _authorizations(item: Any) -> tuple[Authorization, ...]:
    names = Authorization._fields[:-1]
    found = []
    for each in item if isinstance(item, list) else [item]:
        if not isinstance(each, list) or len(each) != len(names):
            raise DecodeFailed(
                None, f"not a transaction: an authorization has {len(names)} fields in a list"
            )
        found.append(Authorization(**rlp_fields(names, each, _KINDS), authority=None))
    return tuple(found)


_NUMBERS: Final = ("chain_id", "gas_price", *_FEES, "max_fee_per_blob_gas", "value", "v", "r", "s")
# How each field is read: the most bytes of a number, or a function.
_KINDS: Final[dict[str, int | Callable[[Any], Any]]] = {
    **dict.fromkeys(_NUMBERS, 32),
    **dict.fromkeys(("nonce", "gas"), 8),
    "to": _bytes("to", (0, _ADDRESS_SIZE)),
    "address": _bytes("address", (_ADDRESS_SIZE,)),
    "input": _bytes("input"),
    "access_list": _access_list,
    "blob_versioned_hashes": _blob_hashes,
    "authorization_list": _authorizations,
}


def _legacy_chain(v: int) -> tuple[int | None, int]:
    """Chain id and parity in `v` (EIP-155); a parity of 2 if `v` is invalid."""
    if v >= 35:
        return (v - 35) // 2, (v - 35) % 2
    return None, v - 27 if v in (27, 28) else 2


def _signed(type: int, content: bytes, items: Any, chain_id: int | None) -> bytes:
    """The signed payload: the encoded items before the signature."""
    start = 1 if content[0] < 0xF8 else 1 + content[0] - 0xF7
    signature = rlp_size(items[-3]) + rlp_size(items[-2]) + rlp_size(items[-1])
    signed = content[start : len(content) - signature]
    if type != LEGACY:
        return bytes([type]) + rlp_list(signed)
    if chain_id is not None:
        signed += rlp_number(chain_id) + b"\x80\x80"
    return rlp_list(signed)


class _Tools(NamedTuple):
    keccak: Callable[[bytes], bytes]
    # The address that signed a hash with (r, s, parity); None if no key can have.
    recover: Callable[[bytes, bytes], bytes | None]


@cache
def keccak() -> Callable[[bytes], bytes]:
    """Keccak-256, Ethereum's hash function. Raises `ExtraMissing`."""
    try:
        hasher = import_module("sha3").keccak_256
    except ImportError:
        raise ExtraMissing("Keccak needs a package that is not installed", "zkevm") from None
    return lambda data: hasher(data).digest()


def load_tools() -> None:
    """Import the packages that open transactions, which takes a while at the first call. Raises
    `ExtraMissing`."""
    _tools()


@cache
def _tools() -> _Tools:
    try:
        coincurve = import_module("coincurve")
    except ImportError:
        raise ExtraMissing(
            "decoding transactions needs packages that are not installed", "zkevm"
        ) from None
    hashed = keccak()
    public_key = coincurve.PublicKey.from_signature_and_message

    def recover(signature: bytes, digest: bytes) -> bytes | None:
        try:
            key = public_key(signature, digest, hasher=None)
        except Exception:  # noqa: BLE001 - the package raises plain Exception
            return None
        return hashed(key.format(compressed=False)[1:])[-_ADDRESS_SIZE:]

    return _Tools(hashed, recover)
