"""/v1/blocks and /v1/transactions: lines about blocks, a transaction with its block."""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import trio

from datastreamer.cli.demo import DemoSequencer
from datastreamer.format import page_start
from datastreamer.http.answers.hash_index import HashIndex
from datastreamer.storage.stream import DataStream
from datastreamer.zkevm.block_json import is_transaction
from datastreamer.zkevm.bookmark_keys import BookmarkName, key_of
from datastreamer.zkevm.decoding import decode, encode
from datastreamer.zkevm.events import L2Block, Transaction
from tests.http.asking import ask
from tests.http.serving import Web, serving
from tests.network.fixtures import append


async def found(web: Web, path: str) -> Any:
    code, _, body = await ask(web.port, path)
    assert code == 200, body
    return json.loads(body)


@pytest.mark.parametrize("version", [1, 3])
async def test_lines_say_what_the_blocks_have(path: Path, version: int) -> None:
    with DataStream.create(path, version=version, sync="os", index="memory") as stream:
        sequencer = DemoSequencer(stream)
        for _ in range(30):
            sequencer.write()
        async with serving(stream) as web:
            newest = await found(web, "/v1/blocks?limit=3")
            assert [each["number"] for each in newest["blocks"]] == [29, 28, 27]
            assert newest["before"] == 27
            oldest = await found(web, "/v1/blocks?before=3")
            assert [each["number"] for each in oldest["blocks"]] == [2, 1, 0]
            assert oldest["before"] is None
            for line in newest["blocks"]:
                whole = await found(web, f"/v1/blocks/{line['number']}")
                [transaction] = whole["transactions"]
                opened = transaction["opened"]
                share = transaction["fields"]["effective_gas_price_percentage"] + 1
                price = opened["gas_price"] or opened["max_fee_per_gas"] or 0
                assert line["entry"] == whole["block"]["entry"]
                assert line["timestamp"] == whole["block"]["fields"]["timestamp"]
                assert line["hash"] == (
                    whole["block"]["fields"].get("hash") or whole["end"]["fields"]["hash"]
                )
                assert (line["transactions"], line["gas"]) == (1, opened["gas"])
                assert int(line["fees"]) == opened["gas"] * price * share // 256
                alone = await found(web, f"/v1/transactions/{transaction['entry']}")
                assert alone["opened"] == opened
                assert alone["block"]["number"] == line["number"]
        [entry] = [e for e in stream.entries(0, 7) if is_transaction(decode(e, version=version))]
        assert entry.number < stream.total_entries


async def test_a_block_that_cannot_be_read_does_not_hide_the_others(path: Path) -> None:
    with DataStream.create(path, version=3, sync="os", index="memory") as stream:
        for number in range(3):
            with stream.atomic_op() as op:
                op.add_bookmark(key_of(3, BookmarkName("block", number)))
                op.add_entry(*encode(L2Block(number=number, timestamp=5), version=3))
                if number == 0:
                    op.add_entry(3, b"no transaction")
                if number == 1:
                    large = encode(Transaction(encoded=bytes(1_000_000)), version=3)
                    op.add_entry(*large)
                    op.add_entry(*large)
        async with serving(stream) as web:
            lines = (await found(web, "/v1/blocks"))["blocks"]
            assert [each["number"] for each in lines] == [2, 1, 0]
            assert ["error" in each for each in lines] == [False, True, True]


async def test_a_hash_in_the_place_of_a_number_leads_to_the_search(path: Path) -> None:
    name = "0x" + 32 * "ab"
    with DataStream.create(path, sync="os", index="memory") as stream:
        async with serving(stream) as web:
            for place in ("transactions/", "blocks/", "entries/", "entries?from=", "bookmarks/"):
                code, _, body = await ask(web.port, f"/v1/{place}{name}")
                detail = json.loads(body)["detail"]
                hint = f"; /v1/search/{name} finds a hash or an address"
                assert (code, detail.endswith(hint)) == (400, True)


async def test_streams_without_blocks(path: Path) -> None:
    with DataStream.create(path, stream_type=7, sync="os", index="memory") as stream:
        append(stream, *[(2, b"x")] * 300)
        async with serving(stream) as web:
            assert await found(web, "/v1/blocks") == {"blocks": [], "before": None}


async def test_a_damaged_page_has_one_line(path: Path) -> None:
    """The blocks before the page follow; other requests for its entries get the same error."""
    with DataStream.create(path, version=3, index="memory") as stream:
        sequencer = DemoSequencer(stream)
        for _ in range(30):
            sequencer.write()
        append(stream, *[(99, bytes(1_000_000))] * 2)
        first = stream.total_entries - 1
        for _ in range(5):
            sequencer.write()
        transaction = max(
            each.number
            for each in stream.entries(first + 1)
            if is_transaction(decode(each, version=3))
        )
        opened = decode(stream.entry(transaction), version=3)
        assert is_transaction(opened)
        name = f"0x{opened.open().hash.hex()}"
        # What is found may not be committed yet, and the end of the server would roll it back.
        async with serving(stream, explorer=True, patience=300):
            with closing(HashIndex(str(path))) as index:
                while (state := index.state()) is None or state.next < stream.total_entries:
                    await trio.sleep(0.02)
    with path.open("r+b") as file:
        file.seek(page_start(1) + 99)
        file.write(b"\x01")
    with DataStream.open(path, index="memory") as stream:
        async with serving(stream, patience=300) as web:
            says = f"damaged at byte {page_start(1)}: page 1 (entries {first} to "
            for query, number in (("?limit=3", None), ("?limit=3&before=33", 32)):
                [damaged, *lines] = (await found(web, f"/v1/blocks{query}"))["blocks"]
                assert damaged["number"] == number
                assert damaged["error"].startswith(says)
                assert [line["number"] for line in lines] == [29, 28]
            for path_of in ("blocks/32", "batches/32", f"transactions/{transaction}"):
                code, _, body = await ask(web.port, f"/v1/{path_of}")
                assert (code, json.loads(body)["detail"][: len(says)]) == (500, says)
            while not (rows := (await found(web, f"/v1/search/{name}"))["found"]):
                await trio.sleep(0.02)
            assert [(row["kind"], row["error"][: len(says)]) for row in rows] == [("damaged", says)]
