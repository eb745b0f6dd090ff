"""Follow a stream over HTTP with httpx, on asyncio: python follow.py http://localhost:8080 [ENTRY]

Prints each entry's number and type, and continues after the last whole event when the connection is
lost.
"""

from __future__ import annotations

import asyncio
import json
import sys

import httpx


async def follow(url: str, first: str | None) -> None:
    """Print entries from number `first` on (None: later commits) until interrupted."""
    parameters = {} if first is None else {"from": first}
    headers: dict[str, str] = {}
    async with httpx.AsyncClient(base_url=url, timeout=httpx.Timeout(10, read=60)) as client:
        while True:
            try:
                async with client.stream(
                    "GET", "/v1/follow", params=parameters, headers=headers
                ) as answer:
                    answer.raise_for_status()
                    event: dict[str, str] = {}
                    async for line in answer.aiter_lines():
                        name, _, value = line.partition(": ")
                        if line:
                            event[name] = value
                            continue
                        if "id" in event:
                            headers["Last-Event-ID"] = event["id"]
                        if event.get("event") == "truncated":
                            total = json.loads(event["data"])["total_entries"]
                            print(f"truncated to {total} entries", flush=True)
                        elif "data" in event:
                            again = " updated" if event.get("event") == "updated" else ""
                            for entry in json.loads(event["data"]):
                                print(f"{entry['number']} {entry['type']}{again}", flush=True)
                        event = {}
            except httpx.TransportError as error:
                print(f"lost {url}, trying again: {error}", file=sys.stderr)
            await asyncio.sleep(1)


if __name__ == "__main__":
    asyncio.run(follow(sys.argv[1], sys.argv[2] if len(sys.argv) > 2 else None))
