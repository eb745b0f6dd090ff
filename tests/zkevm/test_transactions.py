"""Transactions opened: vectors of the EIPs, eth-account as an oracle, and the real stream."""

from __future__ import annotations

import importlib
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from datastreamer.errors import DecodeFailed, ExtraMissing
from datastreamer.zkevm import decode_batch, events, fixed, open_transaction, transactions
from datastreamer.zkevm._rlp import rlp_bytes, rlp_decode, rlp_list, rlp_number
from datastreamer.zkevm.transactions import AccessTuple
from tests.zkevm.generated import changes, mutated

rlp = pytest.importorskip("rlp", reason="rlp is not installed")
pytest.importorskip("sha3", reason="safe-pysha3 is not installed")
pytest.importorskip("coincurve", reason="coincurve is not installed")

# The example of EIP-155: private key 0x46...46 on chain 1.
EIP155 = bytes.fromhex(
    "f86c098504a817c800825208943535353535353535353535353535353535353535880de0b6b3a76400008025a0"
    "28ef61340bd939bc2195fe537567866003e1a15d3c71ff63e1590620aa636276a067cbe9d8997f761aecb703304b"
    "3800ccf555c9f3dc64214b297fb1966a3b6d83"
)
KEY = b"\x46" * 32
OTHER = b"\x47" * 32
OTHER_SIGNER = bytes.fromhex("b595b18c88b1f651ca387489067f855b5c8e6720")
# The order of secp256k1.
ORDER = 0xFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFEBAAEDCE6AF48A03BBFD25E8CD0364141
SIGNER = bytes.fromhex("9d8a62f656a8d1615c1294fd71e9cfb3e4855a4f")


def test_the_example_of_eip_155() -> None:
    opened = open_transaction(EIP155)
    assert opened.type == 0
    assert opened.chain_id == 1
    assert opened.nonce == 9
    assert opened.gas_price == 20 * 10**9
    assert opened.gas == 21_000
    assert opened.to == b"\x35" * 20
    assert opened.value == 10**18
    assert opened.input == b""
    assert opened.access_list == ()
    assert opened.v == 37
    assert f"{opened.r:064x}{opened.s:064x}" == EIP155.hex()[-2 * 65 : -2 * 33] + EIP155.hex()[-64:]
    assert opened.hash.hex() == "33469b22e9f636356c4160a87eb19df52b7412e8eac32a4a55ffe88ea8350788"
    assert opened.sender == SIGNER
    assert opened.max_fee_per_gas is None
    assert not opened.is_injected


def test_without_its_sender() -> None:
    assert open_transaction(EIP155, sender=False) == open_transaction(EIP155)._replace(sender=None)


def test_events_open_theirs() -> None:
    assert events.Transaction(encoded=EIP155).open().sender == SIGNER
    assert fixed.L2Tx(255, True, None, EIP155).open(sender=False).sender is None


amounts = st.integers(0, 2**96 - 1) | st.integers(0, 130)
payloads = st.fixed_dictionaries(
    {
        "nonce": st.integers(0, 2**40) | st.integers(0, 130),
        "gas": st.integers(0, 2**40),
        "to": st.binary(min_size=20, max_size=20) | st.just(b""),
        "value": amounts,
        "data": st.binary(max_size=300),
    }
)
fees = st.fixed_dictionaries({"gasPrice": amounts})
chains = st.integers(1, 2**40) | st.integers(1, 130)
access = st.lists(
    st.tuples(
        st.binary(min_size=20, max_size=20),
        st.lists(st.binary(min_size=32, max_size=32), max_size=3).map(tuple),
    ),
    max_size=3,
)
kinds = st.one_of(
    st.builds(dict, fees),
    st.builds(lambda fee, chain: fee | {"chainId": chain}, fees, chains),
    st.builds(
        lambda fee, chain, reads: fee | {"chainId": chain, "accessList": reads, "type": 1},
        *(fees, chains, access),
    ),
    st.builds(
        lambda tip, top, chain, reads: {
            "maxPriorityFeePerGas": tip,
            "maxFeePerGas": top,
            "chainId": chain,
            "accessList": reads,
            "type": 2,
        },
        *(amounts, amounts, chains, access),
    ),
    st.builds(
        lambda tip, top, chain, reads, blob, hashes: {
            "maxPriorityFeePerGas": tip,
            "maxFeePerGas": top,
            "chainId": chain,
            "accessList": reads,
            "maxFeePerBlobGas": blob,
            "blobVersionedHashes": hashes,
            "type": 3,
        },
        *(amounts, amounts, chains, access, amounts),
        st.lists(st.binary(min_size=31, max_size=31).map(b"\1".__add__), min_size=1, max_size=3),
    ),
    st.builds(
        lambda tip, top, chain, reads, given: {
            "maxPriorityFeePerGas": tip,
            "maxFeePerGas": top,
            "chainId": chain,
            "accessList": reads,
            "authorizationList": given,
            "type": 4,
        },
        *(amounts, amounts, chains, access),
        st.lists(
            st.fixed_dictionaries(
                {
                    "chainId": st.just(0) | chains,
                    "address": st.binary(min_size=20, max_size=20),
                    "nonce": st.integers(0, 2**40) | st.integers(0, 130),
                }
            ),
            min_size=1,
            max_size=3,
        ),
    ),
)


@given(payload=payloads, kind=kinds)
def test_what_eth_account_signs(
    account: Any, payload: dict[str, Any], kind: dict[str, Any]
) -> None:
    if kind.get("type", 0) >= 3:
        payload = payload | {"to": payload["to"] or b"\x11" * 20}
    fields = payload | kind
    given = fields.pop("authorizationList", None)
    if given is not None:
        fields["authorizationList"] = [account.sign_authorization(each, OTHER) for each in given]
    reads = fields.pop("accessList", None)
    if reads is not None:
        fields["accessList"] = [
            {
                "address": f"0x{address.hex()}",
                "storageKeys": [f"0x{key.hex()}" for key in keys],
            }
            for address, keys in reads
        ]
    signed = account.sign_transaction(fields, KEY)
    raw = bytes(signed.raw_transaction)
    opened = open_transaction(raw)
    if opened.type:
        assert open_transaction(rlp_bytes(raw)) == opened
        assert transactions.wrapped(raw) == rlp_bytes(raw)
    assert transactions.wrapped(transactions.wrapped(raw)) == transactions.wrapped(raw)
    assert opened.type == kind.get("type", 0)
    assert opened.chain_id == kind.get("chainId")
    assert opened.sender == SIGNER
    assert opened.hash == bytes(signed.hash)
    assert (opened.v, opened.r, opened.s) == (signed.v, signed.r, signed.s)
    assert (opened.nonce, opened.gas, opened.value) == tuple(
        payload[name] for name in ("nonce", "gas", "value")
    )
    assert (opened.to or b"", opened.input) == (payload["to"], payload["data"])
    assert opened.gas_price == kind.get("gasPrice")
    assert opened.max_fee_per_gas == kind.get("maxFeePerGas")
    assert opened.max_priority_fee_per_gas == kind.get("maxPriorityFeePerGas")
    assert opened.access_list == tuple(AccessTuple(*pair) for pair in reads or ())
    assert opened.max_fee_per_blob_gas == kind.get("maxFeePerBlobGas")
    assert opened.blob_versioned_hashes == tuple(kind.get("blobVersionedHashes", ()))
    assert [
        {"chainId": each.chain_id, "address": each.address, "nonce": each.nonce}
        for each in opened.authorization_list
    ] == (given or [])
    assert {each.authority for each in opened.authorization_list} <= {OTHER_SIGNER}
    reported = opened.as_json()
    json.dumps(reported)
    assert reported["hash"] == f"0x{bytes(signed.hash).hex()}"
    assert int(reported["r"], 16) == signed.r


def test_an_authorization_with_a_high_s_gives_no_authority(account: Any) -> None:
    """Its signature is another one of the same key, but nodes refuse it."""
    given = {"chainId": 1, "address": b"\x22" * 20, "nonce": 3}
    fields = {
        "nonce": 0,
        "gas": 100_000,
        "to": b"\x11" * 20,
        "value": 0,
        "data": b"",
        "type": 4,
        "chainId": 1,
        "maxFeePerGas": 2,
        "maxPriorityFeePerGas": 1,
        "authorizationList": [account.sign_authorization(given, OTHER)],
    }
    raw = bytes(account.sign_transaction(fields, KEY).raw_transaction)
    items = rlp.decode(raw[1:])
    (signed,) = items[9]
    s = ORDER - int.from_bytes(signed[5], "big")
    parity = b"" if signed[3] else b"\x01"
    items[9] = [[*signed[:3], parity, signed[4], s.to_bytes(32, "big")]]
    (low,) = open_transaction(raw).authorization_list
    (high,) = open_transaction(raw[:1] + rlp.encode(items)).authorization_list
    assert (low.authority, low.s + high.s) == (OTHER_SIGNER, ORDER)
    assert high.authority is None


@given(st.binary(max_size=200))
def test_any_bytes_are_a_transaction_or_an_error(data: bytes) -> None:
    error = DecodeFailed(None, "none")
    try:
        open_transaction(data)
    except DecodeFailed as failed:
        error = failed
    assert error.number is None
    assert str(error) == error.reason


@given(changes, st.sampled_from([b"", b"\x01", b"\x02"]))
def test_mutated_transactions(how: list[tuple[int, int, int]], prefix: bytes) -> None:
    data = prefix + mutated(EIP155, how)
    try:
        opened = open_transaction(data)
    except DecodeFailed:
        return
    assert opened.sender is None or len(opened.sender) == 20
    assert opened.as_json()


def legacy(*, v: int = 27, r: int = 1, s: int = 1, **others: bytes) -> bytes:
    """A transaction whose items are numbers that need no signature to be right."""
    items = dict.fromkeys(("nonce", "gas_price", "gas", "to", "value", "input"), b"\x80")
    parts = [*(items | others).values(), *(rlp_number(number) for number in (v, r, s))]
    return rlp_list(b"".join(parts))


def test_the_largest_numbers() -> None:
    most = rlp_number(2**256 - 1)
    short = rlp_number(2**64 - 1)
    opened = open_transaction(legacy(nonce=short, gas=short, value=most, gas_price=most))
    assert (opened.nonce, opened.gas) == (2**64 - 1, 2**64 - 1)
    assert (opened.value, opened.gas_price) == (2**256 - 1, 2**256 - 1)
    numbers = [most, short, most, most, short, b"\x80", most, b"\x80", b"\xc0", *[b"\x01"] * 3]
    assert open_transaction(b"\x02" + rlp_list(b"".join(numbers))).chain_id == 2**256 - 1


@pytest.mark.parametrize(
    "v, r, s",
    [
        (27, *transactions.MARKER),
        (28, *transactions.MARKER),
        (1, 5, 5),  # no parity
        (0, 5, 5),
        (34, 5, 5),
        (27, 0, 5),
        (27, 5, 0),
        (27, 2**256 - 1, 5),
        (2**256 - 1, 5, 5),
        (27, 5, 5),  # 5 is no x of the curve
    ],
)
def test_an_invalid_signature(v: int, r: int, s: int) -> None:
    opened = open_transaction(legacy(v=v, r=r, s=s))
    assert opened.sender is None
    assert opened.is_injected is ((r, s) == transactions.MARKER)


@pytest.mark.parametrize(
    "data, message",
    [
        (b"", "not a transaction"),
        (b"\x00" + EIP155, "not a transaction: unknown type, it begins with 0x00"),
        (b"\x05" + EIP155, "not a transaction: unknown type, it begins with 0x05"),
        (b"\x80", "an RLP string without one in it"),
        (rlp_bytes(EIP155), "an RLP string without one in it"),
        (rlp_bytes(b"\x05" + EIP155), "an RLP string without one in it"),
        (rlp_bytes(b"\x02\x80")[:-1], "not a transaction"),
        (rlp_bytes(b"\x02\x80"), "no list"),
        (b"\x03" + rlp_list(b"\x80" * 14), "its access list is not a list"),
        (b"\x03" + rlp_list(b"\x80" * 8 + b"\xc0\x80\xc0" + b"\x80" * 3), "to is empty"),
        (b"\x03" + rlp_list(b"\x80" * 8 + b"\xc0\x80\xc1\x80" + b"\x80" * 3), "hashes of 32"),
        (b"\x04" + rlp_list(b"\x80" * 8 + b"\xc0\xc1\x80" + b"\x80" * 3), "has 6 fields"),
        (b"\x04" + rlp_list(b"\x80" * 8 + b"\xc0\xc7\xc6" + b"\x80" * 9), "address is 0 bytes"),
        (b"\x01", "not a transaction"),
        (b"\x02\x80", "no list"),
        (EIP155[:-1], "not a transaction"),
        (EIP155 + b"\0", "not a transaction"),
        (rlp_list(b"\x80" * 8), "a list of 8 items, but 9 items are expected"),
        (b"\x01" + rlp_list(b"\x80" * 9), "a list of 9 items, but 11 items are expected"),
        (legacy(to=rlp_bytes(b"x" * 19)), "to is 19 bytes, not 20 or none"),
        (legacy(nonce=b"\xc0"), "nonce is a list"),
        (legacy(nonce=b"\x00"), "the number nonce begins with a zero"),
        (legacy(nonce=rlp_number(2**64)), "the number nonce has 9 bytes, more than 8"),
        (legacy(gas=rlp_number(2**64)), "the number gas has 9 bytes, more than 8"),
        (legacy(value=rlp_number(2**256)), "the number value has 33 bytes, more than 32"),
        (legacy(gas_price=rlp_bytes(b"\x01" * 2000)), "the number gas_price has 2000 bytes"),
        (legacy(v=2**256), "the number v has 33 bytes"),
        (legacy(r=2**256), "the number r has 33 bytes"),
        (legacy(s=2**300), "the number s has 38 bytes"),
        (b"\x01" + rlp_list(b"\x80" * 11), "its access list is not a list"),
        (b"\x01" + rlp_list(b"\x80" * 7 + b"\xc1\x80" + b"\x80" * 3), "not a list of pairs"),
        (b"\x01" + rlp_list(b"\x80" * 7 + b"\xc3\xc2\x80\xc0" + b"\x80" * 3), "needs addresses"),
        (b"\xff" * 9, "not a transaction"),
        (rlp_list(b"\xc1" * 50_000), "not a transaction"),
    ],
)  # fmt: skip
def test_what_is_no_transaction(data: bytes, message: str) -> None:
    with pytest.raises(DecodeFailed, match=message) as caught:
        open_transaction(data)
    assert "\n" not in str(caught.value)


def nested(depth: int) -> bytes:
    data = b"\xc0"
    for _ in range(depth):
        data = rlp_list(data)
    return data


def depth_of(item: Any) -> int:
    return 0 if isinstance(item, bytes) else 1 + max(map(depth_of, item), default=0)


@given(st.binary(max_size=120) | st.integers(0, 3).map(nested), changes)
def test_rlp_is_that_of_the_package(data: bytes, changed: Any) -> None:
    """Both read the same data, and find the same in it; only lists nested too deeply are an
    exception."""
    rlp = importlib.import_module("rlp")
    for encoded in (data, rlp_bytes(data), mutated(rlp_list(rlp_bytes(data) + data), changed)):
        try:
            expected = rlp.decode(encoded)
        except rlp.DecodingError:
            with pytest.raises(ValueError, match=r"\w"):
                rlp_decode(encoded)
            continue
        if depth_of(expected) > 4:
            with pytest.raises(ValueError, match="lists are nested too deeply"):
                rlp_decode(encoded)
        else:
            assert rlp_decode(encoded) == expected


def test_a_list_of_a_million_items() -> None:
    """In a time that rises with the number of its items."""
    with pytest.raises(DecodeFailed, match="a list of 1000000 items, but 9 items are expected"):
        open_transaction(rlp_list(b"\x01" * 1_000_000))


def test_lists_in_lists_without_end() -> None:
    with pytest.raises(DecodeFailed):
        open_transaction(nested(5000))


@pytest.mark.parametrize("missing", ["coincurve", "sha3"])
def test_what_is_not_installed(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def without(name: str, *_: Any) -> Any:
        if name == missing:
            raise ImportError(name)
        return importlib.import_module(name)

    monkeypatch.setattr(transactions, "import_module", without)
    for cached in (transactions._tools, transactions.keccak):
        cached.cache_clear()
    try:
        with pytest.raises(ExtraMissing, match=r"pip install 'datastreamer\[zkevm\]'"):
            open_transaction(EIP155)
    finally:
        for cached in (transactions._tools, transactions.keccak):
            cached.cache_clear()


@pytest.fixture(scope="module")
def real_transactions(real_stream: Any) -> list[bytes]:
    from datastreamer import DataStream

    with DataStream.open(real_stream, read_only=True) as stream:
        return [
            event.encoded
            for run in stream.batches()
            for _, event in decode_batch(run, version=stream.header.version)
            if isinstance(event, events.Transaction)
        ]


def test_the_real_stream(real_transactions: list[bytes]) -> None:
    opened = [open_transaction(encoded) for encoded in real_transactions]
    assert len(opened) == 465
    # The injected one is the first; each other sender's nonces go on without a gap, which no
    # wrongly recovered sender's would.
    assert [tx.is_injected for tx in opened] == [True] + [False] * 464
    assert opened[0].sender is None
    nonces: dict[bytes, int] = {}
    for tx in opened[1:]:
        assert tx.sender is not None
        assert tx.nonce == nonces.get(tx.sender, tx.nonce)
        nonces[tx.sender] = tx.nonce + 1
    assert len(nonces) < 60
    assert len({tx.hash for tx in opened}) == 465
    assert {tx.chain_id for tx in opened} == {None, 779}


def test_the_real_stream_as_eth_account_has_it(
    account: Any, real_transactions: list[bytes]
) -> None:
    for encoded in real_transactions[1::20]:
        sender = account.recover_transaction(encoded)
        assert open_transaction(encoded).sender == bytes.fromhex(sender[2:])
