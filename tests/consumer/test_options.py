"""How callers name the sources of a reassembly."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from datastreamer.client.upstream import Upstream
from datastreamer.consumer.options import named
from datastreamer.errors import UsageError


def test_servers_and_files_by_name() -> None:
    assert named([("a", 1), Path("b.bin")]) == {"a:1": Upstream("a", 1), "b.bin": "b.bin"}
    assert named({"c": Upstream("a", 1)}) == {"c": Upstream("a", 1)}


@pytest.mark.parametrize("addresses", ["a:6900", ["a:6900"], b"x", [5], [], [("a", 1), ("a", 1)]])
def test_what_names_no_sources(addresses: Any) -> None:
    with pytest.raises(UsageError):
        named(addresses)
