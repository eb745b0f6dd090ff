"""What clients keep of a stream, when a power cut takes entries and header that they were sent."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from datastreamer.storage.stream import DataStream
from tests.http.asking import ask
from tests.http.serving import serving
from tests.http.test_durable import PATH, get
from tests.http.test_entries import refused
from tests.http.test_follow import following
from tests.network.fixtures import append
from tests.storage.lab.model import abandon

KEPT = [(1, b"kept")] * 3


@pytest.mark.parametrize("sync", ["os", 60_000])
async def test_other_entries_have_the_numbers_now(tmp_path: Path, sync: Any) -> None:
    path, disk = tmp_path / "s.bin", tmp_path / "disk.bin"
    stream = DataStream.create(path, sync=sync, index="memory")
    append(stream, *KEPT)
    stream.sync()
    shutil.copyfile(path, disk)  # what is on disk: nothing else is synced
    async with serving(stream) as web:
        early, _ = await get(web)
        async with following(web, "?from=0") as client:
            assert len(await client.entries(3)) == 3
            seen = client.id
            append(stream, (1, b"taken"))
            assert len(await client.entries(1)) == 1
        late, _ = await get(web)
        tag = (await ask(web.port, "/v1/entries/3"))[1]["Etag"]
    abandon(stream)
    path.unlink()
    disk.rename(path)  # the power cut
    with DataStream.open(path, sync="os", index="memory") as stream:
        append(stream, *[(2, b"other")] * 2)
        async with serving(stream) as web:
            code, headers, _ = await ask(web.port, "/v1/entries/3", f"If-None-Match: {tag}")
            assert (code, headers["Etag"] != tag) == (200, True)
            async with following(web, "", f"Last-Event-ID: {client.id}") as client:
                event = await client.event()
                assert event is not None
                assert (event["event"], event["data"]) == ("truncated", {"total_entries": 3})
                assert [number for number, *_ in await client.entries(2)] == [3, 4]
            offset = late["Stream-Next-Offset"]
            assert (await refused(web, f"{PATH}?offset={offset}"))[0] == 410
            # Clients that have nothing that was taken continue.
            async with following(web, "", f"Last-Event-ID: {seen}") as client:
                assert [number for number, *_ in await client.entries(2)] == [3, 4]
            _, rows = await get(web, f"?offset={early['Stream-Next-Offset']}")
            assert [row["number"] for row in rows] == [3, 4]
