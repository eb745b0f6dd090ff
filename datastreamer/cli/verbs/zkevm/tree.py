"""Batches and blocks as trees, for people, made from the JSON of `show`."""

from __future__ import annotations

import shutil
from datetime import UTC, datetime
from typing import Any

from rich.text import Text
from rich.tree import Tree

from datastreamer.cli.shared.console import rendered
from datastreamer.cli.shared.console import text as printable_text

_INPUT_SHOWN = 2 + 2 * 16
# The hex of 256 bits.
_AMOUNT_SHOWN = 2 + 2 * 32
_FEES = ("gas_price", "max_priority_fee_per_gas", "max_fee_per_gas", "max_fee_per_blob_gas")


def batch_tree(batch: dict[str, Any]) -> Tree:
    start, end = batch["start"], batch["end"]
    number = start["fields"]["number"] if start else None
    if number is None and batch["blocks"]:
        number = batch["blocks"][0]["block"]["fields"]["batch_number"]
    tree = Tree(Text(f"batch {'' if number is None else number}".rstrip(), "bold"))
    if start:
        fields = start["fields"]
        tree.add(
            _line(
                f"{_kind(fields['type'])}, fork {fields['fork_id']}, chain {fields['chain_id']}",
                start,
            )
        )
        _debug(tree, fields)
    for update in batch["ger_updates"]:
        tree.add(_line(f"UpdateGER {update['fields']['global_exit_root']}", update))
    for block in batch["blocks"]:
        tree.add(block_tree(block))
    if end:
        branch = tree.add(_line("end", end))
        for name in ("local_exit_root", "state_root"):
            branch.add(_line(f"{_words(name)} {end['fields'][name]}"))
        _debug(branch, end["fields"])
    elif start:
        tree.add(_line("no end yet"))
    return tree


def block_tree(block: dict[str, Any]) -> Tree:
    event, end = block["block"], block["end"]
    fields = event["fields"] | (end["fields"] if end else {})
    tree = Tree(_line(f"block {fields['number']} of batch {fields['batch_number']}", event, "bold"))
    tree.add(
        _line(
            f"{_moment(fields['timestamp'])}, {fields['delta_timestamp']} s later"
            if fields.get("delta_timestamp") is not None
            else _moment(fields["timestamp"])
        )
    )
    for name, value in fields.items():
        if name in ("number", "batch_number", "timestamp", "delta_timestamp", "debug"):
            continue
        if value not in (None, 0, "0x") and value != f"0x{'0' * 64}":
            is_amount = name == "base_fee" and len(value) <= _AMOUNT_SHOWN
            shown = f"{int(value, 16)} wei" if is_amount else value
            tree.add(_line(f"{_words(name)} {shown}"))
    _debug(tree, fields)
    for transaction in block["transactions"]:
        tree.add(_transaction(transaction))
    if not block["transactions"]:
        tree.add(_line("no transactions"))
    return tree


def _transaction(transaction: dict[str, Any]) -> Tree:
    fields, opened = transaction["fields"], transaction.get("opened")
    size = (len(fields["encoded"]) - 2) // 2
    if opened is None:
        why = transaction.get("error", "not opened")
        return Tree(_line(f"transaction of {size} bytes: {why}", transaction))
    tree = Tree(_line(f"transaction {opened['hash']}", transaction))
    tree.add(_line(f"from {opened['sender'] or 'unknown: the signature is not valid'}"))
    tree.add(_line(f"to {opened['to'] or 'none: it creates a contract'}"))
    fees = {_words(name): opened[name] for name in _FEES if opened[name] is not None}
    parts = {name: opened[name] for name in ("type", "nonce", "value", "gas")} | fees
    if opened["chain_id"] is not None:
        parts["chain"] = opened["chain_id"]
    tree.add(_line(", ".join(f"{name} {value}" for name, value in parts.items())))
    if opened["access_list"]:
        addresses = (account["address"] for account in opened["access_list"])
        tree.add(_line(f"accesses {', '.join(addresses)}"))
    for blob in opened["blob_versioned_hashes"]:
        tree.add(_line(f"blob {blob}"))
    for each in opened["authorization_list"]:
        who = each["authority"] or "unknown: the signature is not valid"
        tree.add(_line(f"code of {each['address']} for {who}"))
    data = opened["input"]
    if data != "0x":
        cut = data if len(data) <= _INPUT_SHOWN else f"{data[:_INPUT_SHOWN]}..."
        tree.add(_line(f"input of {(len(data) - 2) // 2} bytes, {cut}"))
    if not fields["is_valid"]:
        tree.add(_line("not valid"))
    _debug(tree, fields)
    return tree


def printed(tree: Tree) -> bytes:
    """The tree for standard output, with colours on a terminal."""
    return rendered(tree, width=max(40, shutil.get_terminal_size((100, 25)).columns))


def _line(text: str, event: dict[str, Any] | None = None, style: str = "") -> Text:
    # Text without markup: data of a stream must not be interpreted.
    line = printable_text(text, style)
    if event is not None:
        line.append(f"  entry {event['entry']}", "dim")
    return line


def _debug(tree: Tree, fields: dict[str, Any]) -> None:
    if fields.get("debug"):
        tree.add(_line(f"debug {fields['debug']!r}"))


def _words(name: str) -> str:
    return name.replace("_", " ")


def _kind(type: str | int) -> str:
    return type.lower() if isinstance(type, str) else f"type {type}"


def _moment(timestamp: int) -> str:
    try:
        moment = datetime.fromtimestamp(timestamp, UTC)
    except (ValueError, OverflowError, OSError):
        return f"timestamp {timestamp}"
    return f"{moment:%Y-%m-%d %H:%M:%S} UTC"
