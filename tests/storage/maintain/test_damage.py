"""Every kind of damage, for everything that reads a file.

A file of several pages, damaged in one place, is opened, read, served, checked and
repaired: the outcome is a precise error, or exactly the entries that were there - never a
crash, a hang or an entry that was not. What no program can see, since the format has no sum
over entries (their data, their type, an entry's length where its end looks right by
accident), is said where it is expected: `blind`.
"""

from __future__ import annotations

import os
import re
import struct
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
import trio

from datastreamer import DataStream
from datastreamer.errors import DamagedEntry, DamagedFile, DatastreamerError, NotAStream
from datastreamer.storage.maintain.check import verify
from datastreamer.storage.maintain.repair import plan, repair
from tests.network import model
from tests.network.fixtures import in_memory
from tests.storage.made import BOOKMARK, FIRST, PAGE, Item, make, scan_file

U32, U64 = 2**32 - 1, 2**64 - 1
DATA = b"\x91data" * 60_000
# Pages 0, 1 and 2 with 6, 4 and 4 entries; the first ends in padding, the second is
# exactly full.
ITEMS: list[Item] = [
    *[(BOOKMARK, b"one"), (1, DATA), (2, b"small"), (3, DATA), (1, DATA), (BOOKMARK, b"two")],
    *[(1, DATA), (2, DATA), (3, DATA), (4, DATA[: PAGE - 4 * 17 - 3 * len(DATA)])],
    *[(BOOKMARK, b"one"), (1, DATA), (2, DATA), (3, b"the last")],
]
TOTAL = len(ITEMS)
FIRSTS = (0, 6, 10)

Bytes = bytearray
Change = Callable[[Bytes], object]


class Damage(NamedTuple):
    """The first `left` entries of a file with records are readable, `left_bare` of one without;
    None: a repair refuses. `blind` names entries that may be read wrong. `fine`: this is not
    damage, or nothing shows in which page it is; `refuted`: the commit record shows that there is
    damage."""

    name: str
    change: Change
    left: int | None
    left_bare: int | None
    blind: tuple[int, ...] = ()
    fine: bool = False
    refuted: bool = False


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    operations = [ITEMS[:3], ITEMS[3:7], ITEMS[7:13], ITEMS[13:]]
    path = tmp_path_factory.mktemp("whole") / "stream.bin"
    make(path, *operations, version=2, system_id=7, stream_type=1)
    os.truncate(path, FIRST + 3 * PAGE)  # it grew by more than it needed
    return path


def places() -> list[int]:
    """The offsets at which the entries begin."""
    found, at = [], FIRST
    for _, data in ITEMS:
        if (at - FIRST) % PAGE + 17 + len(data) > PAGE:
            at = FIRST + -(-(at - FIRST) // PAGE) * PAGE
        found.append(at)
        at += 17 + len(data)
    return [*found, at]


PLACES = places()
END = PLACES[TOTAL]


def put(offset: int, size: int, value: int) -> Change:
    def change(content: Bytes) -> None:
        content[offset : offset + size] = (value & (1 << 8 * size) - 1).to_bytes(size, "big")

    return change


def values(size: int, now: int) -> dict[str, int]:
    """Every value that matters, except the present one."""
    wanted = {"0": 0, "1": 1, "max": (1 << 8 * size) - 1, "one more": now + 1, "one less": now - 1}
    return {name: value for name, value in wanted.items() if value != now and value >= 0}


def of_the_header() -> Iterator[Damage]:
    for at in (0, 7, 15):
        yield Damage(f"magic byte {at}", put(at, 1, 0xFF), TOTAL, None)
    for name, offset, size, now in (("packet type", 16, 1, 1), ("length", 17, 4, 38)):
        for what, value in values(size, now).items():
            yield Damage(f"header {name} {what}", put(offset, size, value), TOTAL, TOTAL)
    # Only the records know the previous values.
    for name, offset, size, now in (
        ("version", 21, 1, 2),
        ("system id", 22, 8, 7),
        ("stream type", 30, 8, 1),
    ):
        for what, value in values(size, now).items():
            yield Damage(f"header {name} {what}", put(offset, size, value), TOTAL, TOTAL)
    for what, value in values(8, END).items():
        yield Damage(f"header total length {what}", put(38, 8, value), TOTAL, TOTAL)
    yield Damage("header total length in a page", put(38, 8, PLACES[7] + 5), TOTAL, TOTAL)
    # As a truncation to the first entry of a page leaves it.
    at_the_page = put(38, 8, FIRST + 3 * PAGE)
    yield Damage("header total length of the page", at_the_page, TOTAL, TOTAL, fine=True)
    yield Damage("header total length 2**63", put(38, 8, 1 << 63), TOTAL, TOTAL)
    for what, value in values(8, TOTAL).items():
        yield Damage(f"header total entries {what}", put(46, 8, value), TOTAL, TOTAL)
    totals = bytes(16)
    yield Damage("header totals zero", lambda c: c.__setitem__(slice(38, 54), totals), TOTAL, None)
    yield Damage("header zero", lambda c: c.__setitem__(slice(0, 54), bytes(54)), TOTAL, None)
    yield Damage("header page zero", lambda c: c.__setitem__(slice(0, FIRST), bytes(FIRST)), *NO)


NO = (None, None)


def of_entries() -> Iterator[Damage]:
    for n in (0, 5, 6, 7, 9, TOTAL - 1):
        at, (kind, data) = PLACES[n], ITEMS[n]
        length = 17 + len(data)
        for value in (0, 1, 255):
            yield Damage(f"entry {n} packet type {value}", put(at, 1, value), n, n)
        for what, value in values(4, length).items():
            # Only the next entry shows that: it is not noticed before padding, and at the end only
            # by the records.
            fine = (n, what) == (5, "one more")
            bare = TOTAL if (n == TOTAL - 1 and what.startswith("one")) or fine else n
            left, change = TOTAL if fine else n, put(at + 1, 4, value)
            yield Damage(f"entry {n} length {what}", change, left, bare, (n,), fine, fine)
        # The checksum of the last page is in the records; other pages have none here.
        last = n >= FIRSTS[2]
        for what, value in values(4, kind).items():
            name, change = f"entry {n} type {what}", put(at + 5, 4, value)
            left = FIRSTS[2] if last else TOTAL
            yield Damage(name, change, left, TOTAL, (n,), fine=not last, refuted=not last)
        for what, value in values(8, n).items():
            yield Damage(f"entry {n} number {what}", put(at + 9, 8, value), n, n)
        name, left = f"entry {n} a bit of data", FIRSTS[2] if last else TOTAL
        yield Damage(name, flip(at + 19), left, TOTAL, (n,), fine=not last, refuted=not last)


def flip(offset: int) -> Change:
    return lambda content: content.__setitem__(offset, content[offset] ^ 4)


def fill(place: slice, byte: bytes) -> Change:
    return lambda content: content.__setitem__(place, byte * (place.stop - place.start))


def of_pages() -> Iterator[Damage]:
    pages = [slice(FIRST + n * PAGE, FIRST + (n + 1) * PAGE) for n in range(3)]

    def swap(content: Bytes) -> None:
        content[pages[0]], content[pages[1]] = content[pages[1]], content[pages[0]]

    def swap_last(content: Bytes) -> None:
        content[pages[1]], content[pages[2]] = content[pages[2]], content[pages[1]]

    yield Damage("first pages swapped", swap, 0, 0)
    yield Damage("last pages swapped", swap_last, 6, 6)
    for n, left in enumerate(FIRSTS):
        for name, byte in (("zero", b"\0"), ("ones", b"\xff")):
            yield Damage(f"page {n} {name}", fill(pages[n], byte), left, left)
    stale = pages[1], pages[0]
    yield Damage("stale page", lambda c: c.__setitem__(stale[0], c[stale[1]]), 6, 6)

    def zeros(start: int) -> Change:
        return lambda content: content.__setitem__(slice(start, None), bytes(len(content) - start))

    yield Damage("zeros from an entry on", zeros(PLACES[7]), 7, 7)
    # The head of entry 7 is whole and has its length; nothing confirms its data.
    yield Damage("zeros from the middle of an entry on", zeros(PLACES[7] + 99), 8, 8, (7,))
    yield Damage("zeros from the middle of a head on", zeros(PLACES[7] + 3), 7, 7)
    # If the next page begins with the next entry, the length of the one before is in doubt.
    padding = PLACES[5] + 17 + 3
    yield Damage("padding not marked", put(padding, 1, 7), 5, 5)
    yield Damage("padding after its mark", put(padding + 1, 4, U32), TOTAL, TOTAL, fine=True)
    yield Damage("stale bytes after the end", put(END, 8, U64), TOTAL, TOTAL, fine=True)


def of_the_size() -> Iterator[Damage]:
    def cut(size: int) -> Change:
        return lambda content: content.__delitem__(slice(size, None))

    for size in (0, 10, 54, FIRST - 1):
        yield Damage(f"cut to {size}", cut(size), *NO)
    yield Damage("cut to the header page", cut(FIRST), 0, 0)
    yield Damage("cut in an entry", cut(PLACES[7] + 50), 7, 7)
    yield Damage("cut at a page", cut(FIRST + PAGE), 6, 6)
    yield Damage("cut at the end", cut(END), TOTAL, TOTAL)
    yield Damage("cut in the last page", cut(END + 5), TOTAL, TOTAL)
    yield Damage("a byte more", lambda content: content.extend(b"\1"), TOTAL, TOTAL)
    yield Damage(
        "a page more", lambda content: content.extend(bytes(PAGE)), TOTAL, TOTAL, fine=True
    )


def of_our_records() -> Iterator[Damage]:
    """Only for files with records. No fact is in one record only."""
    for name, offset in (
        ("commit record", 64),
        ("first synced header", 512),
        ("second synced header", 1024),
        ("mark", 1536),
        ("writer", 2048),
    ):
        for at in (0, 20, 47):
            yield Damage(f"{name} byte {at}", flip(offset + at), TOTAL, TOTAL)
    zero = bytes(FIRST - 64)
    yield Damage("no records", lambda c: c.__setitem__(slice(64, FIRST), zero), TOTAL, 0, fine=True)


ALL = [*of_the_header(), *of_entries(), *of_pages(), *of_the_size()]
ALIKE = re.compile("entry [0679] ")
BARE = [it for it in ALL if not ALIKE.match(it.name)]
# In a file without records some damage cannot be noticed.
UNSEEN_IN_BARE = re.compile(r"header (version|system id|stream type)|entry \d+ (type|a bit)")


def by_name(damages: list[Damage]) -> pytest.MarkDecorator:
    """Of entries like others every third damage, another one for each of them; the soak tests have
    all."""
    alike = {it.name: at for at, it in enumerate(it for it in ALL if ALIKE.match(it.name))}
    marks = {name: () if at % 3 == 0 else pytest.mark.soak for name, at in alike.items()}
    return pytest.mark.parametrize(
        "damage",
        [pytest.param(it, marks=marks.get(it.name, ()), id=it.name) for it in damages],
    )


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """In memory if the system has that: a thousand copies are made and synced."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else tmp_path) as made:
        yield Path(made)


@pytest.fixture
def damaged(whole: Path, folder: Path, damage: Damage) -> Path:
    path = folder / "stream.bin"
    content = bytearray(whole.read_bytes())
    damage.change(content)
    path.write_bytes(content)
    return path


@pytest.fixture
def bare(whole: Path, folder: Path, damage: Damage) -> Path:
    """The same without records, as another program leaves it."""
    path = folder / "bare.bin"
    content = bytearray(whole.read_bytes())
    content[64:FIRST] = bytes(FIRST - 64)
    damage.change(content)
    path.write_bytes(content)
    return path


def agree(got: list[Item], damage: Damage) -> None:
    """Check that the entries that were read are the first of those written."""
    assert len(got) <= TOTAL
    for number, (found, written) in enumerate(zip(got, ITEMS, strict=False)):
        right = found == written or number in damage.blind
        assert right, f"entry {number} is a wrong one"


def read_all(stream: DataStream) -> tuple[list[Item], DatastreamerError | None]:
    got: list[Item] = []
    try:
        got += [(entry.type, entry.data) for entry in stream.entries()]
    except DatastreamerError as error:
        return got, error
    return got, None


def is_precise(error: DatastreamerError, path: Path) -> None:
    """Check that the error names the file and the offset, in one line."""
    assert isinstance(error, DamagedFile | NotAStream), repr(error)
    assert str(error).startswith(f"{path}: ")
    assert isinstance(error, NotAStream) or re.search(r"at byte \d+", str(error))
    assert "\n" not in str(error)


@by_name([*ALL, *of_our_records()])
@pytest.mark.parametrize("write", [False, True], ids=["read only", "for writing"])
def test_open_and_read(damaged: Path, damage: Damage, write: bool) -> None:
    before = damaged.read_bytes()
    try:
        stream = DataStream.open(damaged, read_only=not write, index="memory")
    except DatastreamerError as error:
        is_precise(error, damaged)
        assert not damage.fine
        assert damaged.read_bytes() == before
        return
    with stream:
        got, error = read_all(stream)
        agree(got, damage)
        if error is None:
            assert len(got) == stream.total_entries
        else:
            is_precise(error, damaged)
            assert not damage.fine
        for number in range(TOTAL):
            try:
                entry = stream.entry(number)
            except DatastreamerError as failed:
                assert not damage.fine
                if number < stream.total_entries:
                    is_precise(failed, damaged)
            else:
                found = entry.type, entry.data
                assert found == ITEMS[number] or number in damage.blind
    if not write:
        assert damaged.read_bytes() == before


@by_name(ALL)
def test_serve(damaged: Path, damage: Damage) -> None:
    try:
        stream = DataStream.open(damaged, read_only=True, index="memory")
    except DatastreamerError as error:
        is_precise(error, damaged)
        return

    async def serve() -> bytes:
        async with in_memory(stream) as rig, rig.client() as client:
            await client.send(model.start(0))
            await client.expect(model.OK)
            sent = b""
            while len(sent) < expected:
                try:
                    more = await client.stream.receive_some(1 << 20)
                except trio.BrokenResourceError:
                    break
                if not more:
                    break
                sent += more
            return sent

    with stream:
        expected = sum(17 + len(data) for _, data in read_all(stream)[0])
        sent = trio.run(serve)
    got, at = [], 0
    while at + 17 <= len(sent):
        packet, length, kind, number = model.struct.unpack_from(">BIIQ", sent, at)
        assert (packet, number) == (2, len(got))
        if at + length > len(sent):
            break  # the connection ended in the middle of it
        got.append((kind, sent[at + 17 : at + length]))
        at += length
    agree(got, damage)
    if damage.fine:
        assert len(got) == TOTAL


@by_name([*ALL, *of_our_records()])
def test_verify(damaged: Path, damage: Damage) -> None:
    before = damaged.read_bytes()
    report = verify(damaged)
    assert damaged.read_bytes() == before
    assert list(damaged.parent.iterdir()) == [damaged]
    assert report.ok == (not report.problems) == (damage.fine and not damage.refuted)
    for problem in report.problems:
        assert re.fullmatch(r"byte \d+", problem.where), problem
        advice = "none" if damage.left is None else "run `datastreamer repair "
        assert problem.repair.startswith(advice), problem
        assert int(problem.where[5:]) <= max(len(before), END), problem
    if damage.fine:
        assert (report.entries, report.pages) == (TOTAL, 3)


@by_name(BARE)
def test_verify_without_records(bare: Path, damage: Damage) -> None:
    report = verify(bare)
    unseen = UNSEEN_IN_BARE.match(damage.name) is not None
    assert report.ok == (damage.fine or unseen), report


def kept_by_cut(left: int | None, content: bytes) -> int | None:
    """A cut removes the whole page of the first unreadable entry; and the page before, which ends
    in padding, if nothing in the second one says that it ends there."""
    if left is None or left == TOTAL:
        return left
    page = max(page for page, first in enumerate(FIRSTS) if first <= left)
    at = FIRST + page * PAGE
    begins = content[at : at + 1] == b"\2" and content[at + 9 : at + 17] == struct.pack(">Q", 6)
    return FIRSTS[page - 1] if page == 1 and not begins else FIRSTS[page]


def check_repair(
    path: Path, damage: Damage, left: int | None, original: bytes, *, refuted: bool = False
) -> None:
    before = path.read_bytes()
    left = kept_by_cut(left, before)
    try:
        planned = plan(path, cut=True)
    except DatastreamerError as error:
        is_precise(error, path)
        if left is not None:
            raise
        with pytest.raises(type(error), match=re.escape(str(error))):
            repair(path, cut=True)
        assert path.read_bytes() == before
        assert list(path.parent.iterdir()) == [path]
        return
    assert path.read_bytes() == before
    done = repair(path, cut=True)
    assert done.plan.steps == planned.steps
    assert done.report.ok != refuted
    entries = scan_file(path)
    assert len(entries) == left
    agree([(entry.type, entry.data) for entry in entries], damage)
    if planned.healthy or refuted:
        assert path.read_bytes() == before
        assert done.kept is None
        return
    assert verify(path).ok
    size = path.stat().st_size
    assert (size - FIRST) % PAGE == 0
    assert size > done.plan.header.total_length  # type: ignore[union-attr]
    # The kept bytes undo the repair.
    assert done.kept is not None
    kept = Path(done.kept).read_bytes()
    assert kept[:FIRST] == before[:FIRST]
    start, stop = done.plan.keep_from, done.plan.keep_to
    assert kept[FIRST:] == before[start:stop]
    if left == TOTAL and not damage.blind:
        assert path.read_bytes()[: min(END, len(original))][FIRST:] == original[FIRST:END]
    # A second repair finds nothing to do.
    now = path.read_bytes()
    assert repair(path, cut=True).plan.healthy
    assert repair(path).plan.healthy
    assert path.read_bytes() == now
    with DataStream.open(path) as stream:
        assert stream.total_entries == left
        with stream.atomic_op() as op:
            assert op.add_entry(1, b"appended") == left
    assert len(scan_file(path)) == left + 1


@by_name([*ALL, *of_our_records()])
def test_repair(damaged: Path, damage: Damage, whole: Path) -> None:
    original = whole.read_bytes()
    check_repair(damaged, damage, damage.left, original, refuted=damage.refuted)
    if damage.name.startswith(("header", "magic")) and damage.left == TOTAL:
        with DataStream.open(damaged, read_only=True) as stream:
            assert stream.header[:3] == (2, 7, 1)


@by_name(BARE)
def test_repair_without_records(bare: Path, damage: Damage, whole: Path) -> None:
    check_repair(bare, damage, damage.left_bare, whole.read_bytes())


MISLEADING = ("last pages swapped", "entry 6 number 1", "entry 6 number one less")


def check_what_is_kept(
    path: Path, damage: Damage, *, refuted: bool = False
) -> tuple[int, set[int]]:
    """Repair without truncation before damage; returns the total and the entries that are lost."""
    before = path.read_bytes()
    try:
        planned = plan(path)
    except DatastreamerError as error:
        is_precise(error, path)
        with pytest.raises(type(error), match=re.escape(str(error))):
            repair(path)
        assert path.read_bytes() == before
        return 0, set()
    done = repair(path)
    assert done.plan.steps == planned.steps
    lost = {n for first, stop in done.plan.lost for n in range(first, stop)}
    assert len(lost) == done.plan.entries_lost
    assert done.report.ok == (not lost and not refuted)
    if not planned.steps:
        assert path.read_bytes() == before
        assert done.kept is None
    now = path.read_bytes()
    again = repair(path)
    assert (again.plan.steps, again.plan.lost) == ([], done.plan.lost)
    assert again.plan.healthy == done.report.ok
    assert path.read_bytes() == now
    # Exactly the lost entries cannot be read, with an index or without.
    for options in ({"read_only": True}, {"follow": True}, {}):
        with DataStream.open(path, verify="always", **options) as stream:  # type: ignore[arg-type]
            total = stream.total_entries
            for number in range(total):
                try:
                    entry = stream.entry(number)
                except DamagedEntry:
                    assert number in lost
                else:
                    # (Without a checksum the end of an entry may be all that is wrong.)
                    right = (entry.type, entry.data) == ITEMS[number]
                    assert right or number in damage.blind, number
                    assert number not in lost or not stream.epoch
    with DataStream.open(path, verify="always") as stream:
        with stream.atomic_op() as op:
            assert op.add_bookmark(b"new") == total
            op.add_entry(1, b"appended")
        assert stream.bookmark(b"new") == total
        assert stream.entry(total + 1).data == b"appended"
        whole = {d: n for n, (k, d) in enumerate(ITEMS[:total]) if k == BOOKMARK and n not in lost}
        whole = {key: number for key, number in whole.items() if number not in damage.blind}
        for key, number in whole.items():
            newest = max(n for n, item in enumerate(ITEMS) if item == (BOOKMARK, key))
            try:
                found = stream.bookmark(key)
            except DamagedEntry:
                # The newest one is in a damaged page; or a page without a checksum begins with the
                # number of an entry in another page, and misleads look-ups.
                assert newest in lost or damage.name in MISLEADING
            else:
                assert found in (number, newest)
    return total, lost


def pages_of(*pages: int) -> set[int]:
    bounds = [*FIRSTS, TOTAL]
    return {n for page in pages for n in range(bounds[page], bounds[page + 1])}


@by_name([*ALL, *of_our_records()])
def test_repair_without_truncation(damaged: Path, damage: Damage) -> None:
    total, lost = check_what_is_kept(damaged, damage, refuted=damage.refuted)
    if damage.left is None:
        assert total in (0, TOTAL)
    elif damage.name.startswith("cut "):
        assert (total, lost) == (damage.left, set())
    else:
        assert total == TOTAL
        if damage.left == TOTAL:
            assert not lost
        else:
            # The first entry that a truncation would remove, and no page that is whole.
            assert damage.left in lost
            assert lost <= set(range(FIRSTS[max(0, damage.left >= 6)], TOTAL))
    if found := re.fullmatch(r"page (\d) (zero|ones)", damage.name):
        assert lost == pages_of(int(found[1]))


@by_name(BARE)
def test_repair_without_truncation_or_records(bare: Path, damage: Damage) -> None:
    total, lost = check_what_is_kept(bare, damage)
    if damage.left_bare is not None:
        assert total >= damage.left_bare
    if found := re.fullmatch(r"page ([01]) (zero|ones)", damage.name):
        assert (total, lost) == (TOTAL, pages_of(int(found[1])))
    if re.fullmatch(r"page 2 (zero|ones)", damage.name):
        # No record confirms that the entries of the last page were committed.
        assert (total, lost) == (FIRSTS[2], set())


def test_the_file_has_the_expected_layout(whole: Path) -> None:
    entries = scan_file(whole)
    assert [(entry.type, entry.data) for entry in entries] == ITEMS
    assert [entry.offset for entry in entries] == PLACES[:-1]
    assert [n for n in range(TOTAL) if (PLACES[n] - FIRST) % PAGE == 0] == list(FIRSTS)
    assert PLACES[9] + 17 + len(ITEMS[9][1]) == PLACES[10]
    assert verify(whole).ok
    assert verify(whole).notes == []
