"""A transaction of each type, signed by eth-account."""

from __future__ import annotations

from typing import Any

KEY = b"\x46" * 32
TO, OTHER, BLOB = f"0x{'11' * 20}", f"0x{'22' * 20}", f"0x01{'33' * 31}"


def signed_types(account: Any) -> list[Any]:
    """Signed by `KEY` for chain 7; the position is the type."""
    common = {"chainId": 7, "nonce": 1, "gas": 21_000, "to": TO, "value": 5}
    fees = {"maxPriorityFeePerGas": 2, "maxFeePerGas": 9}
    reads = [{"address": OTHER, "storageKeys": []}]
    permission = account.sign_authorization({"chainId": 7, "address": OTHER, "nonce": 0}, KEY)
    payloads = [
        {"gasPrice": 3},
        {"type": 1, "gasPrice": 3, "accessList": reads},
        {"type": 2, **fees},
        {"type": 3, **fees, "maxFeePerBlobGas": 4, "blobVersionedHashes": [BLOB]},
        {"type": 4, **fees, "authorizationList": [permission]},
    ]
    return [account.sign_transaction(common | payload, KEY) for payload in payloads]
