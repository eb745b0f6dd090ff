"""Entries as JSON, with their times."""

from __future__ import annotations

import json
import random

import pytest

from datastreamer._codec import scan, scan_chosen
from datastreamer.selection.times import TimeMarks, moment_text
from datastreamer.zkevm.entry_json import KnownTimes, timed, timed_lines
from tests.network.model import pack


def test_of_what_is_not_known_yet_nothing_is_asked_again() -> None:
    asked = []

    def ask(number: int, most: int) -> TimeMarks:
        asked.append(number)
        return TimeMarks(((3, 7000),), 1000, 5) if number < 5 else TimeMarks((), 0, number)

    batch = scan(b"".join(pack(n, 1, b"x") for n in range(2, 9)), 2)
    found = [
        (part.first_number, part.next_number, ms) for part, ms in timed(batch, KnownTimes(ask))
    ]
    assert found == [(2, 3, None), (3, 5, 7000), (5, 9, None)]
    assert asked == [2, 5]


@pytest.mark.parametrize("seed", range(40))
def test_the_parts_of_batches(seed: int) -> None:
    """Against an oracle: stretches of known and unknown times in answers of any length, batches of
    any length, with and without gaps."""
    chance = random.Random(seed)
    entries, total = 60, chance.randint(0, 60)
    due: list[int | None] = [None]
    while len(due) < total:
        due.append(chance.choice([due[-1], due[-1], due[-1], None, 20 + len(due)]))
    due += [None] * (entries - len(due))

    def ask(number: int, most: int) -> TimeMarks:
        assert most > 0
        first = number
        while first < total and due[first] is None:
            first += 1
        at, marks, left = first, list[tuple[int, int]](), chance.randint(1, 5)
        while at < total and (ms := due[at]) is not None:
            if not marks or marks[-1][1] != ms:
                if not left:
                    break
                left -= 1
                marks.append((at, ms))
            at += 1
        return TimeMarks(tuple(marks), 1000, max(at, number))

    times, number, found = KnownTimes(ask), 0, dict[int, int | None]()
    while number < entries:
        stop = min(entries, number + chance.randint(1, 20))
        kept = [n for n in range(number, stop) if seed % 2 or n % 3]
        data = b"".join(pack(n, 1, b"x") for n in kept)
        batch = scan_chosen(data, number, stop, start=0, end=len(data))
        for part, ms in timed(batch, times):
            found.update({entry.number: ms for entry in part})
        lines = [json.loads(line) for line in timed_lines(batch, KnownTimes(ask)).splitlines()]
        assert [each["number"] for each in lines] == kept
        for each in lines:
            ms = due[each["number"]]
            assert each.get("time") == (None if ms is None else moment_text(ms))
        assert list(found)[len(found) - len(kept) :] == kept
        number = stop
    assert found == {number: due[number] for number in found}
