"""The published conformance suite of Durable Streams: its cases of reading, against a real server.

`tests/http/durable_front.py` writes what the cases read. Cases of writing are left out by name.
"""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Final

import pytest
import trio

from tests.http.durable_front import serve_front
from tests.programs import needs, npm_package

SUITE: Final = "@durable-streams/server-conformance-tests"
# Groups of cases of which none reads, but for what it has written in a way that is tested there.
GROUPS_LEFT_OUT: Final = (
    "Basic Stream Operations",
    "Append Operations",
    "TTL and Expiry",
    "TTL Expiration Behavior",
    "HEAD Metadata Edge Cases",  # of the time to live
    "Idempotent Producer Operations",
    "Stream Closure",
    "Fork - ",
    "Reserved subscription APIs",
)
OF_WRITING: Final = (
    # Creation.
    "should return correct headers on PUT",
    "should return 200 on idempotent PUT",
    "should return 409 on PUT",
    "should include X-Content-Type-Options: nosniff on PUT",
    "should allow idempotent create",
    "should accept PUT without Content-Type",
    "should allow PUT with empty array",
    "should return Location header on 201",
    # Appending.
    "should return correct headers on POST",
    "should return 404 on POST",
    "should return 409 on content-type mismatch",
    "should include X-Content-Type-Options: nosniff on POST",
    "should enforce content-type match on append",
    "should allow append with matching content-type",
    "should treat content-type case-insensitively",
    "should accept headers with different casing",
    "should reject empty POST body",
    "should reject missing Content-Type on POST",
    "should reject POST with empty array",
    "should reject empty JSON arrays",
    "should reject invalid JSON",
    # Deletion, and the order of Stream-Seq.
    "DELETE",
    "sequence ordering",
    "lexicographic seq",
    "duplicate seq",
    "case-sensitive seq",
    "Sequence Ordering Properties",
    "concurrent writers",
    "concurrent appends",
)
# A stream here is of JSON.
OF_BINARY_STREAMS: Final = ("base64", "Data-Encoding header for binary streams")
LEAST: Final = 100

FILE: Final = """
import {{ runConformanceTests }} from {suite}
runConformanceTests({{ baseUrl: {url} }})
"""


@needs("node")
async def test_cases_of_reading(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("datastreamer.http.answers.durable._POLL_SECONDS", 1.0)
    suite = npm_package(SUITE)
    runner = npm_package("vitest") / "vitest.mjs"
    names = [*map(re.escape, (*OF_WRITING, *OF_BINARY_STREAMS))]
    groups = "|".join(map(re.escape, GROUPS_LEFT_OUT))
    pattern = f"^(?!({groups}))(?!.*({'|'.join(names)}))"
    report = tmp_path / "report.json"
    async with trio.open_nursery() as nursery:
        port = await nursery.start(serve_front, tmp_path)
        url = json.dumps(f"http://127.0.0.1:{port}")
        module = json.dumps((suite / "dist" / "index.js").as_uri())
        (tmp_path / "read.test.mjs").write_text(FILE.format(suite=module, url=url))
        words = ["node", runner, "run", "--root", tmp_path, "--reporter", "json"]
        done = await trio.run_process(
            [*map(str, words), "--outputFile", str(report), "-t", pattern],
            check=False,
            capture_stdout=True,
            stderr=subprocess.STDOUT,
        )
        nursery.cancel_scope.cancel()
    assert report.exists(), done.stdout.decode()
    cases = [
        case
        for file in json.loads(report.read_text())["testResults"]
        for case in file["assertionResults"]
        if case["status"] != "skipped"
    ]
    failed = {
        case["fullName"]: case["failureMessages"] for case in cases if case["status"] != "passed"
    }
    assert not failed
    assert len(cases) >= LEAST
