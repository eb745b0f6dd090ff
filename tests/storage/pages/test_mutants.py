"""The tests of this folder bite: each way to break a law of the pages is found by one of them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from xxhash import xxh3_64_intdigest, xxh3_128_digest

from datastreamer.storage.pages import compare, restore_open
from datastreamer.storage.pages.keeper import SumsKeeper
from datastreamer.storage.pages.records import RecordReader
from datastreamer.storage.pages.sidecar import PageSum
from tests.storage.pages.test_attack import State, attack_in, states
from tests.storage.pages.test_proof import test_a_restoration_beside_a_truncation as beside_it

pytestmark = pytest.mark.mutants

__all__ = ["states"]  # a fixture

Mutant = Callable[[], contextlib.AbstractContextManager[Any]]

SEEDS = range(240)
"""Those of the attack in the suite."""


def compares(differs: Callable[[bytes, PageSum], str]) -> Mutant:
    """Pages are compared in another way."""

    @contextlib.contextmanager
    def patched() -> Iterator[None]:
        with mock.patch.object(compare, "differs", differs):
            yield

    return patched


def no_mark(content: bytes, known: PageSum) -> str:
    return "" if xxh3_128_digest(content[: known.end]) == known.digest else "differs"


def all_padding(content: bytes, known: PageSum) -> str:
    same = xxh3_64_intdigest(content[known.end :]) == known.padding
    return no_mark(content, known) or ("" if same else "the padding differs")


@contextlib.contextmanager
def loose_is_proven() -> Iterator[None]:
    with (
        mock.patch.object(RecordReader, "get_many", RecordReader.unproven),
        mock.patch.object(SumsKeeper, "get_many", SumsKeeper.unproven),
    ):
        yield


MUTANTS: dict[str, Mutant] = {
    "a record that nothing proves counts": loose_is_proven,
    "the padding mark is not compared": compares(no_mark),
    "all padding is compared": compares(all_padding),
}


@pytest.mark.parametrize("mutant", MUTANTS.values(), ids=MUTANTS)
def test_an_attack_finds_it(tmp_path: Path, states: list[State], mutant: Mutant) -> None:
    def attack_all() -> None:
        for seed in SEEDS:
            attack_in(tmp_path, states, seed)

    with mutant(), pytest.raises(AssertionError):
        attack_all()


def test_a_restoration_that_ignores_changes(tmp_path: Path) -> None:
    with (
        mock.patch.object(restore_open, "_is_at", return_value=True),
        pytest.raises(AssertionError),
    ):
        beside_it(tmp_path)
