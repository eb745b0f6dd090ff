"""What a check says of damaged pages, from the walk over the entries and from the checksums.

Owns which of the two is believed: a checksum names its page and all entries of it, and the form of
the entries the place of the damage, and the entries if the page has no checksum. Reads nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from datastreamer.format import page_of, page_start
from datastreamer.storage.header.records import Head
from datastreamer.storage.maintain.report import Help
from datastreamer.storage.maintain.sums_audit import DamagedRange
from datastreamer.storage.read.page_scan import Damage


class PageProblem(NamedTuple):
    """The byte, what was found there, and what helps; and the page, of two the second."""

    offset: int
    what: str
    helps: Help
    page: int


def page_problems(
    damages: Sequence[Damage], differing: Sequence[DamagedRange], total: int | None
) -> list[PageProblem]:
    """What is wrong with the pages, in their order.

    `damages` break the sequence of the entries, `differing` are the pages that do not match their
    checksums, `total` is the number of entries in the header.
    """
    return sorted(_problems(damages, differing, total), key=lambda each: each.offset)


def first_damaged(
    problems: Sequence[PageProblem],
    differing: Sequence[DamagedRange],
    end: Head | None,
    named: Head | None,
    size: int,
) -> int | None:
    """The first page that is damaged or missing; None if there is none.

    The form of the entries is right up to `end`, records say that they end at `named`, and the file
    ends at `size`.
    """
    pages = [each.page for each in differing]
    if end is not None and named is not None and end < named:
        broken = (each.page for each in problems if each.offset >= end.length)
        stop = size if size < named.length else end.length
        pages.append(min(broken, default=page_of(stop)))
    return min(pages, default=None)


def _problems(
    damages: Sequence[Damage], differing: Sequence[DamagedRange], total: int | None
) -> Iterator[PageProblem]:
    known = {each.page: each for each in differing}
    described = set()
    for damage in damages:
        page = page_of(damage.offset)
        if damage.order:
            before = damage.offset == page_start(page)
            beside = page - 1 if before else page + 1
            if any(each in known and _is_exact(known[each]) for each in (page, beside)):
                continue  # the checksum says which of the two it is, and what the page held
            second = page if before else page + 1
            yield PageProblem(damage.offset, _described(damage, total), Help.DAMAGE, second)
        elif page in known:
            described.add(page)
            what = f"{damage.what}; {_entries(known[page])} cannot be read"
            yield PageProblem(damage.offset, what, Help.PAGE, page)
        else:
            yield PageProblem(damage.offset, _described(damage, total), Help.DAMAGE, page)
    for each in differing:
        if each.page not in described:
            what = f"page {each.page} ({_entries(each)}): {each.what}"
            yield PageProblem(page_start(each.page), what, Help.PAGE, each.page)


def _is_exact(each: DamagedRange) -> bool:
    """Whether the first entry of the page is known."""
    return each.first > 0 or each.page == 0


def _entries(each: DamagedRange) -> str:
    if not _is_exact(each):
        return f"entries up to {each.end - 1}"
    last = each.end - 1
    return f"entry {last}" if last == each.first else f"entries {each.first} to {last}"


def _described(damage: Damage, total: int | None) -> str:
    """A damage, and the entries that it makes unreadable."""
    first, after, what = damage.first, damage.after, damage.what
    if first is None:
        return f"{what}; nothing on this page can be read"
    last = (total if after is None else after) or 0
    if last - first == 1:
        return f"{what}; entry {first} cannot be read"
    if last > first:
        return f"{what}; entries {first} to {last - 1} cannot be read"
    return what
