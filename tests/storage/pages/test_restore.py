"""Pages that servers restore: which answers are accepted, and what a kill at any step leaves."""

from __future__ import annotations

import random
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from datastreamer import DataStream
from datastreamer.errors import ConnectFailed, DamagedEntry, DamagedPage, UnknownBookmark
from datastreamer.format import Header
from datastreamer.storage.maintain.check import verify
from datastreamer.storage.maintain.repair import Repaired, Sources, plan, repair
from datastreamer.storage.pages import restore, restore_open
from datastreamer.storage.pages.hashes import Sum
from datastreamer.storage.pages.restore import HealedPages
from datastreamer.storage.write.opening import make_sums
from tests.storage.made import (
    FIRST,
    PAGE,
    FaultyDisk,
    KilledDisk,
    Stop,
    half_update,
    header_of,
    make,
    scan_file,
    trace_of,
)

Change = Callable[[bytearray], object]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three whole pages and one that is not."""
    path = tmp_path_factory.mktemp("heal") / "s.bin"
    source = random.Random(11)
    with DataStream.create(path, system_id=9, version=3, sync="os") as stream:
        while stream.header.total_length < FIRST + 3 * PAGE + PAGE // 3:
            with stream.atomic_op() as op:
                op.add_bookmark(stream.total_entries.to_bytes(8, "big"))
                for _ in range(9):
                    op.add_entry(source.randrange(5), source.randbytes(source.randrange(20_000)))
    return path


def copied(whole: Path, folder: Path, change: Change = lambda content: None) -> Path:
    """The file, its checksums and its index, changed."""
    shutil.copytree(whole.parent, folder)
    path = folder / "s.bin"
    content = bytearray(path.read_bytes())
    change(content)
    path.write_bytes(content)
    return path


class FilePeer:
    """Answers as a server of a file does."""

    only_proven = False

    def __init__(
        self, path: Path, name: str = "peer:6900", *, has_id: bool = True, has_sums: bool = True
    ) -> None:
        self.name = name
        self._has_sums = has_sums
        self.asked: list[tuple[int, int]] = []
        self._path = path
        with DataStream.open(path, read_only=True, verify="never", index="memory") as stream:
            self._header, self._id = stream.header, stream.stream_id if has_id else bytes(16)
        content = path.read_bytes()
        self._packed = {
            it.number: content[it.offset : it.offset + 17 + len(it.data)] for it in scan_file(path)
        }

    def header(self) -> Header:
        return self._header

    def stream_id(self) -> bytes:
        return self._id

    def page_sums(self, pages: int) -> list[Sum]:
        if not self._has_sums:
            return []
        with DataStream.open(self._path, read_only=True, verify="never", index="memory") as stream:
            return stream.parts.pages.sums(0, pages)[0]

    def entries(self, first: int, stop: int, most: int) -> bytes:
        self.asked.append((first, stop))
        found = b"".join(self._packed[number] for number in range(first, stop))
        assert len(found) <= most
        return found

    def close(self) -> None:
        pass

    def ends_at(self, total: int) -> None:
        """It has no later entries."""
        self._header = self._header._replace(total_entries=total)

    def change(self, number: int) -> FilePeer:
        """Change a byte of an entry's data."""
        packed = bytearray(self._packed[number])
        packed[-1] ^= 1
        self._packed[number] = bytes(packed)
        return self


class GonePeer(FilePeer):
    def header(self) -> Header:
        raise ConnectFailed(f"{self.name}: connection refused")


def span(page: int) -> slice:
    return slice(FIRST + page * PAGE, FIRST + (page + 1) * PAGE)


def zero(page: int) -> Change:
    return lambda content: content.__setitem__(span(page), bytes(PAGE))


def flip(offset: int) -> Change:
    return lambda content: content.__setitem__(offset, content[offset] ^ 4)


def bounds(whole: Path, page: int) -> tuple[int, int]:
    """The entries of a page."""
    place = span(page)
    numbers = [it.number for it in scan_file(whole) if place.start <= it.offset < place.stop]
    return numbers[0], numbers[-1] + 1


def without_sums(path: Path) -> Path:
    path.with_name("s.bin.sums").unlink()
    return path


def healed(path: Path, *peers: FilePeer, trust_peer: bool = False) -> Repaired:
    return repair(path, sources=Sources(peers, trust_peer))


def swap(content: bytearray) -> None:
    content[span(0)], content[span(1)] = content[span(1)], content[span(0)]


def torn(content: bytearray) -> None:
    start = span(1).start + 300 * 512
    content[start : start + 512 * 200] = b"\xaa" * (512 * 200)


def wrong_length(content: bytearray) -> None:
    start = span(2).start
    content[start + 1 : start + 5] = (1 << 30).to_bytes(4, "big")


def two_pages(content: bytearray) -> None:
    zero(1)(content)
    zero(2)(content)


def short(content: bytearray) -> None:
    del content[span(2).start + 999 :]


def shorter(content: bytearray) -> None:
    del content[span(1).start :]


def header_too(content: bytearray) -> None:
    zero(2)(content)
    content[38:54] = b"\xff" * 16


DAMAGES: dict[str, Change] = {
    "zeros": zero(1),
    "the first page": zero(0),
    "the last page": zero(3),
    "ones": lambda content: content.__setitem__(span(2), b"\xff" * PAGE),
    "a bit": flip(span(1).start + 70_000),
    "a bit of the last page": flip(span(3).start + 70_000),
    "the first byte of a page": flip(span(2).start),
    "a torn page": torn,
    "a length": wrong_length,
    "two pages": two_pages,
    "swapped pages": swap,
    "a stale page": lambda content: content.__setitem__(span(2), content[span(1)]),
    "the end of the file": short,
    "most of the file": shorter,
    "a page and the header": header_too,
}


@pytest.mark.parametrize("name", DAMAGES)
def test_every_kind_of_damage(whole: Path, tmp_path: Path, name: str) -> None:
    path = copied(whole, tmp_path / "damaged", DAMAGES[name])
    before = trace_of(path.parent)
    total = header_of(whole)[-1]
    peer = FilePeer(whole)
    planned = plan(path, sources=Sources([peer]))
    assert trace_of(path.parent) == before
    assert (planned.lost, planned.shortened) == ([], False)
    done = healed(path, peer)
    assert done.plan.steps == planned.steps
    assert (done.report.ok, done.report.entries, done.plan.lost) == (True, total, [])
    assert all(it.source == peer.name and Path(it.kept).exists() for it in done.plan.healed)
    end = header_of(whole)[-2]
    assert path.read_bytes()[FIRST:end] == whole.read_bytes()[FIRST:end]
    assert verify(path).ok
    trace = trace_of(path.parent)
    assert healed(path, peer).plan.healthy
    assert trace_of(path.parent) == trace
    with DataStream.open(path, verify="always") as stream:
        assert sum(len(batch) for batch in stream.batches()) == total
        assert stream.bookmark((0).to_bytes(8, "big")) == 0


def plans_alike(path: Path, *peers: FilePeer, cut: bool = False) -> Repaired:
    """Repair the file as the plan says, which changes nothing."""
    before = trace_of(path.parent)
    planned = plan(path, cut=cut, sources=Sources(peers))
    assert trace_of(path.parent) == before
    done = repair(path, cut=cut, sources=Sources(peers))
    named = [it._replace(kept="") for it in done.plan.healed]
    assert (planned.steps, planned.healed) == (done.plan.steps, named)
    assert (planned.lost, planned.shortened) == (done.plan.lost, done.plan.shortened)
    assert planned.entries_cut == done.plan.entries_cut
    assert (planned.lost == [] and not planned.held) == done.report.ok
    return done


@pytest.mark.parametrize("name", DAMAGES)
def test_a_plan_without_servers(whole: Path, tmp_path: Path, name: str) -> None:
    done = plans_alike(copied(whole, tmp_path / "damaged", DAMAGES[name]))
    short = name in ("the end of the file", "most of the file")
    assert (done.plan.shortened, done.plan.entries_cut > 0) == (short, short)


def test_a_plan_with_a_server_that_has_a_part(whole: Path, tmp_path: Path) -> None:
    """It restores a page in the middle, and not the end."""

    def change(content: bytearray) -> None:
        short(content)
        zero(0)(content)

    path = copied(whole, tmp_path / "damaged", change)
    content = path.read_bytes()
    peer = FilePeer(whole)
    peer.ends_at(bounds(whole, 1)[1])
    done = plans_alike(path, peer)
    assert [bool(it.source) for it in done.plan.healed] == [True, False, False]
    assert "are missing, and no server named restored them" in done.plan.held
    assert path.stat().st_size == len(content)
    assert not plans_alike(path, peer).report.ok
    assert plans_alike(path).report.ok


def test_a_plan_for_padding_that_is_not_zeros(whole: Path, tmp_path: Path) -> None:
    """The checksum of the restored page is another one then."""
    at = span(2).start - 3
    path = copied(whole, tmp_path / "damaged", flip(at))
    make_sums(path, accept=True)
    content = bytearray(path.read_bytes())
    zero(1)(content)
    path.write_bytes(content)
    assert plans_alike(path, FilePeer(whole)).report.ok


def test_a_plan_for_half_an_update(whole: Path, tmp_path: Path) -> None:
    """The old bytes are restored first: the page needs no server."""
    path = copied(whole, tmp_path / "damaged", zero(2))
    entry = next(it for it in scan_file(whole) if it.number > 3 and len(it.data) > 5000)
    half_update(path, entry.offset + 17, entry.data, bytes(len(entry.data)))
    done = plans_alike(path, FilePeer(whole))
    assert [it.page for it in done.plan.healed] == [2]
    assert done.report.ok


@pytest.mark.parametrize("name", DAMAGES)
def test_a_cut_keeps_no_entry_that_may_be_wrong(whole: Path, tmp_path: Path, name: str) -> None:
    path = copied(whole, tmp_path / "damaged", DAMAGES[name])
    now, then = path.read_bytes(), whole.read_bytes()
    end = header_of(whole)[-2]
    differ = [
        p
        for p in range(4)
        if now[span(p)][: end - span(p).start] != then[span(p)][: end - span(p).start]
    ]
    done = plans_alike(path, cut=True)
    assert done.report.ok
    assert [*scan_file(path)] == [
        it for it in scan_file(whole) if it.offset < span(differ[0]).start
    ]
    assert not done.plan.shortened


def test_a_cut_after_half_of_an_entry(whole: Path, tmp_path: Path) -> None:
    """The form of the entry is right: only the checksum of the last page shows that it is not."""
    inside = [it for it in scan_file(whole) if it.offset >= span(3).start and len(it.data) > 3000]
    start = inside[3].offset + len(inside[3].data) // 2

    def change(content: bytearray) -> None:
        content[start : header_of(whole)[-2]] = bytes(header_of(whole)[-2] - start)

    path = copied(whole, tmp_path / "damaged", change)
    assert plans_alike(path, cut=True).report.ok
    assert [*scan_file(path)] == [it for it in scan_file(whole) if it.offset < span(3).start]


def padding_of(whole: Path, page: int) -> int:
    """The offset of the padding mark in a page."""
    last = [it for it in scan_file(whole) if it.offset < span(page).stop][-1]
    return last.offset + 17 + len(last.data)


def test_a_cut_clears_padding(whole: Path, tmp_path: Path) -> None:
    """The entries before it match their checksum."""
    path = copied(whole, tmp_path / "damaged", flip(padding_of(whole, 1)))
    done = plans_alike(path, cut=True)
    assert done.plan.steps == ["clear the padding after the entries of page 1"]
    assert path.read_bytes() == whole.read_bytes()


ORDERS = ("swapped pages", "a stale page")


@pytest.mark.parametrize("name", ORDERS)
def test_the_lost_entries_of_pages_in_another_order(whole: Path, tmp_path: Path, name: str) -> None:
    """Checksums say which entries a page held; the page before it is whole."""
    path = copied(whole, tmp_path / "damaged", DAMAGES[name])
    pages = [2] if name == "a stale page" else [0, 1]
    expected = []
    for page in pages:
        first, stop = bounds(whole, page)
        what = (
            f"page {page} (entries {first} to {stop - 1}): the entries do not match their checksum"
        )
        expected.append((f"byte {span(page).start}", what))
    assert [(it.where, it.what) for it in verify(path).problems] == expected
    lost = repair(path).plan.lost
    assert [*lost] == [(bounds(whole, pages[0])[0], bounds(whole, pages[-1])[1])]


def test_the_lost_entries_of_a_page_after_pages_in_another_order(
    whole: Path, tmp_path: Path
) -> None:
    def change(content: bytearray) -> None:
        content[span(1)] = content[span(0)]
        zero(2)(content)

    path = copied(whole, tmp_path / "damaged", change)
    first, stop = bounds(whole, 2)
    assert f"entries {first} to {stop - 1} cannot be read" in verify(path).problems[1].what


def test_order_without_checksums(whole: Path, tmp_path: Path) -> None:
    path = without_sums(copied(whole, tmp_path / "damaged", DAMAGES["a stale page"]))
    assert "the next page begins with entry" in verify(path).problems[0].what
    assert repair(path, cut=True).report.entries == bounds(whole, 0)[1]


def test_a_healthy_file_is_not_touched_and_no_server_asked(whole: Path, tmp_path: Path) -> None:
    path = copied(whole, tmp_path / "copy")
    before, peer = trace_of(path.parent), FilePeer(whole)
    assert healed(path, peer).plan.healthy
    assert trace_of(path.parent) == before
    assert peer.asked == []


def test_without_servers_the_lost_entries_are_exact(whole: Path, tmp_path: Path) -> None:
    path = copied(whole, tmp_path / "damaged", flip(span(1).start + 70_000))
    before = trace_of(path.parent)
    done = repair(path)
    assert trace_of(path.parent) == before
    assert done.plan.lost == [bounds(whole, 1)]
    assert done.plan.entries_lost == bounds(whole, 1)[1] - bounds(whole, 1)[0]
    assert not verify(path).ok


def test_only_the_entries_that_are_needed_are_requested(whole: Path, tmp_path: Path) -> None:
    path = copied(whole, tmp_path / "damaged", zero(1))
    peer = FilePeer(whole)
    healed(path, peer)
    first, stop = bounds(whole, 1)
    assert peer.asked == [(first - 1, stop + 1)]


def test_the_copy_undoes_it(whole: Path, tmp_path: Path) -> None:
    path = copied(whole, tmp_path / "damaged", zero(1))
    before = path.read_bytes()
    (result,) = healed(path, FilePeer(whole)).plan.healed
    kept = Path(result.kept).read_bytes()
    assert kept == before[:FIRST] + before[span(1)]


def test_padding_needs_no_server(whole: Path, tmp_path: Path) -> None:
    end = padding_of(whole, 1)
    assert end + 5 < span(1).stop
    path = copied(whole, tmp_path / "mark", flip(end))
    assert not verify(path).ok
    done = repair(path)
    assert done.plan.steps == ["clear the padding after the entries of page 1"]
    assert done.report.ok
    assert path.read_bytes() == whole.read_bytes()
    # What follows the mark is not the stream's.
    path = copied(whole, tmp_path / "after", flip(end + 5))
    assert verify(path).ok
    assert repair(path).plan.healthy


@pytest.mark.parametrize("page", [0, 1, 3])
def test_sectors_that_cannot_be_read(
    whole: Path, tmp_path: Path, page: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Without a server the others are kept; writing the page makes the disk use other sectors."""
    path, disk = copied(whole, tmp_path / "damaged"), FaultyDisk()
    bad = span(page).start + 70_000 // 512 * 512
    disk.bad_sectors = {bad, bad + 512}
    done = repair(path, disk=disk)
    assert done.plan.lost == [bounds(whole, page)]
    assert disk.bad_sectors == {bad, bad + 512}
    assert f"the disk cannot read bytes {bad // 4096 * 4096} to " in caplog.text
    done = repair(path, sources=Sources([FilePeer(whole)]), disk=disk)
    assert (done.report.ok, done.plan.lost, disk.bad_sectors) == (True, [], set())
    end = header_of(whole)[-2]
    assert path.read_bytes()[FIRST:end] == whole.read_bytes()[FIRST:end]


def test_a_sector_of_an_open_stream_that_cannot_be_read(
    whole: Path, tmp_path: Path, page: int
) -> None:
    path, disk = copied(whole, tmp_path / "open"), FaultyDisk()
    with DataStream.open(path, disk=disk) as stream:
        disk.bad_sectors = {span(page).start + 512 * 90}
        result = stream.parts.pages.heal(page, [FilePeer(whole)])
        assert result is not None
        assert result.source
        assert not disk.bad_sectors
        assert stream.entry(bounds(whole, page)[0]).number == bounds(whole, page)[0]
    assert path.read_bytes()[span(page)] == whole.read_bytes()[span(page)]


TOTALS: dict[str, Callable[[int, int], tuple[int, int]]] = {
    "others": lambda length, entries: (123_456_789, 42),
    "too few entries": lambda length, entries: (length, 42),
    "a bit of the count": lambda length, entries: (length, entries ^ 64),
    "a low bit of the count": lambda length, entries: (length, entries ^ 1),
    "a bit of the length": lambda length, entries: (length ^ 1 << 20, entries),
    "a length within a page": lambda length, entries: (FIRST + PAGE + 777, entries),
    "larger than the file": lambda length, entries: (length ^ 1 << 40, entries),
    "impossible": lambda length, entries: (2**64 - 1, 2**64 - 1),
    "zeros": lambda length, entries: (0, 0),
}


@pytest.mark.parametrize(
    ("page", "name"),
    [
        # Each page with half of the totals; the soak tests have all pairs.
        pytest.param(page, name, marks=() if (i + j) % 2 == 0 else pytest.mark.soak)
        for i, page in enumerate([None, 0, 2, 3])
        for j, name in enumerate(TOTALS)
    ],
)
def test_the_commit_record_proves_the_totals(
    whole: Path, tmp_path: Path, name: str, page: int | None
) -> None:
    """Whatever the header says, with a damaged page or without one."""
    length, total = header_of(whole)[-2:]

    def change(content: bytearray) -> None:
        content[38:54] = b"".join(n.to_bytes(8, "big") for n in TOTALS[name](length, total))
        if page is not None:
            flip(span(page).start + 70_000)(content)

    path = copied(whole, tmp_path / "damaged", change)
    assert not verify(path).ok
    done = repair(copied(path, tmp_path / "alone"))
    assert header_of(tmp_path / "alone" / "s.bin")[-2:] == (length, total)
    assert done.plan.lost == ([] if page is None else [bounds(whole, page)])
    done = healed(path, FilePeer(whole))
    assert (done.report.ok, done.report.entries, done.plan.lost) == (True, total, [])
    assert path.read_bytes()[:54] == whole.read_bytes()[:54]
    assert path.read_bytes()[FIRST:length] == whole.read_bytes()[FIRST:length]


@pytest.mark.parametrize("at", [70, 100, 150, 250])
@pytest.mark.parametrize("page", [0, 2])
def test_without_a_commit_record_nothing_proves_the_checksums(
    whole: Path, tmp_path: Path, at: int, page: int
) -> None:
    """A page that differs from its checksum is named, is not refused, and is written over only if
    two servers send the same."""

    def change(content: bytearray) -> None:
        flip(at)(content)
        flip(span(page).start + 70_000)(content)

    path = copied(whole, tmp_path / "damaged", change)
    note = f"page {page} differ from checksums that the commit record does not prove"
    assert note in verify(path).notes
    alone = copied(path, tmp_path / "alone")
    assert repair(alone).plan.lost == []
    written = copied(path, tmp_path / "written")
    with DataStream.open(written, verify="always") as stream:
        while stream._ensure_writable().sums_completer.complete_page():
            pass
        assert len([*stream.entries()]) == stream.total_entries
    one = copied(path, tmp_path / "one")
    (result,) = healed(one, FilePeer(whole)).plan.healed
    assert "name a second server" in result.why
    done = healed(path, FilePeer(whole), FilePeer(whole, "other:6900"))
    assert (done.report.ok, done.plan.lost) == (True, [])
    end = header_of(whole)[-2]
    assert path.read_bytes()[FIRST:end] == whole.read_bytes()[FIRST:end]


# Which answers are accepted.


def refused(done: Repaired, whole: Path, path: Path, page: int = 1) -> str:
    """Check that nothing was restored; returns why."""
    assert done.plan.lost == [bounds(whole, page)]
    assert not done.report.ok
    (result,) = done.plan.healed
    assert (result.source, result.kept) == ("", "")
    assert not list(path.parent.glob("*.repair"))
    return result.why


def test_a_peer_that_is_damaged_there(whole: Path, tmp_path: Path) -> None:
    path = copied(whole, tmp_path / "damaged", zero(1))
    first, _ = bounds(whole, 1)
    why = refused(healed(path, FilePeer(whole).change(first + 3)), whole, path)
    assert why == "peer:6900: its entries of page 1 do not match the checksum"
    done = healed(path, FilePeer(whole, "bad:1").change(first + 3), FilePeer(whole, "good:2"))
    (result,) = done.plan.healed
    assert (result.source, done.report.ok) == ("good:2", True)
    assert result.why.startswith("bad:1: ")


def test_a_peer_of_another_stream(whole: Path, tmp_path: Path) -> None:
    path = copied(whole, tmp_path / "damaged", zero(1))
    other = tmp_path / "other.bin"
    make(other, [(1, b"x")], system_id=8, version=3)
    why = refused(healed(path, FilePeer(other)), whole, path)
    assert why == "peer:6900: it serves another stream: system id 8, not 9"


def test_a_peer_with_other_neighbours(whole: Path, tmp_path: Path) -> None:
    path = without_sums(copied(whole, tmp_path / "damaged", zero(1)))
    first, stop = bounds(whole, 1)
    for number in (first - 1, stop):
        peers = [FilePeer(whole, f"{n}:1", has_id=False).change(number) for n in range(2)]
        why = refused(healed(path, *peers), whole, path)
        assert f"0:1: it serves another stream: its entry {number} differs" in why


def test_a_peer_that_is_gone(whole: Path, tmp_path: Path) -> None:
    path = copied(whole, tmp_path / "damaged", zero(1))
    why = refused(healed(path, GonePeer(whole)), whole, path)
    assert why == "peer:6900: connection refused"
    assert healed(path, GonePeer(whole), FilePeer(whole)).report.ok


def test_the_name_of_a_peer_is_in_a_refusal_once(whole: Path, tmp_path: Path) -> None:
    class LostPeer(FilePeer):
        def header(self) -> Header:
            raise ConnectFailed(f"cannot connect to {self.name}: Connection refused")

    path = copied(whole, tmp_path / "damaged", zero(1))
    why = refused(healed(path, LostPeer(whole)), whole, path)
    assert why == "cannot connect to peer:6900: Connection refused"


def test_a_peer_with_fewer_entries(whole: Path, tmp_path: Path) -> None:
    path = copied(whole, tmp_path / "damaged", zero(1))
    shorter = copied(whole, tmp_path / "shorter")
    _, stop = bounds(whole, 1)
    with DataStream.open(shorter) as stream:
        stream.truncate(stop - 1)
    why = refused(healed(path, FilePeer(shorter)), whole, path)
    assert why == f"peer:6900: it has {stop - 1:,} entries, and entry {stop - 1} is needed"


def test_without_a_checksum(whole: Path, tmp_path: Path) -> None:
    """Two servers have to send the same bytes, or the operator trusts one."""
    path = without_sums(copied(whole, tmp_path / "damaged", zero(1)))
    first, _ = bounds(whole, 1)
    one, two = (FilePeer(whole, name, has_sums=False) for name in ("one:1", "two:2"))
    wrong = FilePeer(whole, "wrong:3", has_sums=False).change(first + 3)
    why = refused(healed(path, one), whole, path)
    assert why.startswith("only one:1 sends these entries")
    assert "--trust-peer" in why
    for trust in (False, True):
        why = refused(healed(path, one, wrong, trust_peer=trust), whole, path)
        assert "one:1 and wrong:3 send different bytes" in why
    why = refused(healed(path, one, two, wrong), whole, path)
    assert "send different bytes" in why
    content = path.read_bytes()
    (result,) = healed(path, one, two).plan.healed
    assert result.source == "one:1 and two:2"
    assert path.read_bytes()[: 3 * PAGE] == whole.read_bytes()[: 3 * PAGE]
    path.write_bytes(content)
    (result,) = healed(path, one, trust_peer=True).plan.healed
    assert result.source == "one:1"
    assert verify(path).ok


def test_several_pages_without_checksums(whole: Path, tmp_path: Path) -> None:
    path = without_sums(copied(whole, tmp_path / "damaged", two_pages))
    peers = [FilePeer(whole, name, has_sums=False) for name in ("one:1", "two:2")]
    done = healed(path, *peers)
    (result,) = done.plan.healed
    assert (result.page, result.end_page) == (1, 3)
    assert done.report.ok
    assert path.read_bytes()[FIRST : span(3).start] == whole.read_bytes()[FIRST : span(3).start]


@pytest.mark.parametrize("name", [name for name in DAMAGES if name != "a page and the header"])
def test_the_commit_record_proves_the_checksums_of_one_server(
    whole: Path, tmp_path: Path, name: str
) -> None:
    """The file has none, in whatever way it is damaged."""
    path = without_sums(copied(whole, tmp_path / "damaged", DAMAGES[name]))
    wrong = FilePeer(whole, "wrong:1", has_sums=False).change(bounds(whole, 1)[0] + 3)
    done = plans_alike(path, wrong, FilePeer(whole))
    assert done.report.ok
    end = header_of(whole)[-2]
    assert path.read_bytes()[FIRST:end] == whole.read_bytes()[FIRST:end]


class OtherNumbers(FilePeer):
    """Its checksums are right, and its numbers of entries are not."""

    def page_sums(self, pages: int) -> list[Sum]:
        found = super().page_sums(pages)
        return [(first + 5, stop + 5, digest) for first, stop, digest in found]


def test_a_server_with_other_numbers(whole: Path, tmp_path: Path) -> None:
    """They are used only where no page of the file shows them; another server may have others."""
    path = without_sums(copied(whole, tmp_path / "damaged", two_pages))
    done = healed(path, OtherNumbers(whole, "wrong:1"), FilePeer(whole))
    assert done.report.ok
    assert [it.stop for it in done.plan.healed] == [bounds(whole, page)[1] for page in (1, 2)]
    path = without_sums(copied(whole, tmp_path / "one page", zero(1)))
    assert healed(path, OtherNumbers(whole)).report.ok


def test_many_pages_without_checksums(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of them would be held in memory."""
    monkeypatch.setattr(restore, "_MOST_UNPROVEN", 1)
    path = without_sums(copied(whole, tmp_path / "damaged", two_pages))
    peers = [FilePeer(whole, name, has_sums=False) for name in ("one:1", "two:2")]
    (result,) = healed(path, *peers).plan.healed
    assert "these 2 pages begin and end, and at most 1 such pages are restored" in result.why
    assert not any(peer.asked for peer in peers)


def no_first_sector(content: bytearray) -> None:
    """Header and commit record."""
    content[:512] = bytes(512)


def test_the_first_sector_is_lost_and_a_page_damaged(whole: Path, tmp_path: Path) -> None:
    def change(content: bytearray) -> None:
        no_first_sector(content)
        flip(span(1).start + 70_000)(content)

    path = copied(whole, tmp_path / "damaged", change)
    note = "page 1 differ from checksums that the commit record does not prove"
    assert note in verify(path).notes
    assert repair(copied(path, tmp_path / "alone")).plan.lost == []
    assert plans_alike(path, FilePeer(whole), FilePeer(whole, "other:6900")).report.ok
    end = header_of(whole)[-2]
    assert path.read_bytes()[FIRST:end] == whole.read_bytes()[FIRST:end]


@pytest.mark.parametrize("trust", [False, True])
def test_the_last_page_is_compared_if_its_checksum_is_lost(
    whole: Path, tmp_path: Path, trust: bool
) -> None:
    def change(content: bytearray) -> None:
        no_first_sector(content)
        flip(span(3).start + 70_000)(content)

    path = copied(whole, tmp_path / "damaged", change)
    before = path.read_bytes()
    gone, one, two = GonePeer(whole), FilePeer(whole, "one:1"), FilePeer(whole, "two:2")
    for peers in ([gone], [one], [gone, one]):
        done = plans_alike(path, *peers)
        assert "nothing proves the entries of the last page" in done.plan.held
        assert "no server sends the entries that the file has; " in done.plan.healed[0].why
        assert path.read_bytes() == before
    done = healed(path, one, trust_peer=True) if trust else healed(path, one, two)
    assert done.report.ok
    end = header_of(whole)[-2]
    assert path.read_bytes()[FIRST:end] == whole.read_bytes()[FIRST:end]


def test_the_last_page_is_as_a_server_has_it(whole: Path, tmp_path: Path) -> None:
    path = copied(whole, tmp_path / "damaged", no_first_sector)
    done = plans_alike(path, GonePeer(whole, "gone:1"), FilePeer(whole))
    assert (done.report.ok, done.plan.healed) == (True, [])


# Interruptions.


@pytest.mark.parametrize("name", ["zeros", "the last page", "two pages", "the end of the file"])
def test_killed_at_any_write(whole: Path, tmp_path: Path, name: str) -> None:
    damaged = copied(whole, tmp_path / "damaged", DAMAGES[name])
    for left in range(60):
        folder = tmp_path / f"run {left}"
        path = copied(damaged, folder)
        try:
            repair(path, sources=Sources([FilePeer(whole)]), disk=KilledDisk(left))
        except Stop:
            done = healed(path, FilePeer(whole))
            assert done.report.ok
        else:
            assert left > 4
            break
        end = header_of(whole)[-2]
        assert path.read_bytes()[FIRST:end] == whole.read_bytes()[FIRST:end]
        assert verify(path).ok
        assert not list(folder.glob("*.new"))
        shutil.rmtree(folder)
    else:
        raise AssertionError("it never ends")


# A stream that is open for writing.


@pytest.fixture(params=[1, 3])
def page(request: pytest.FixtureRequest) -> int:
    """A whole page, and the last one."""
    return int(request.param)


def test_an_open_stream(whole: Path, tmp_path: Path, page: int) -> None:
    path, peer = copied(whole, tmp_path / "open"), FilePeer(whole)
    first, stop = bounds(whole, page)
    with DataStream.open(path, verify="always") as stream:
        assert stream.parts.pages.heal(page, [peer]) is None
        with path.open("r+b") as file:
            file.seek(span(page).start + 70_000)
            file.write(b"\xff" * 999)
        with DataStream.open(path, follow=True, verify="always") as follower:
            with pytest.raises(DamagedPage):
                follower.entry(first)
            assert follower.entry(0).number == 0
            # It was whole when this stream was opened: a new process, or a cold page, shows it.
            epoch = stream.epoch
            result = stream.parts.pages.heal(page, [FilePeer(whole, "bad:1").change(first), peer])
            assert isinstance(result, HealedPages)
            assert (result.page, result.first, result.stop) == (page, first, stop)
            assert result.source == peer.name
            assert stream.epoch == epoch
            assert follower.entry(first).number == first
            assert not follower.refresh()
            assert [it.number for it in follower.entries(first, stop)] == [*range(first, stop)]
        assert stream.parts.pages.heal(page, [peer]) is None
        with stream.atomic_op() as op:
            op.add_entry(1, b"appended")
    assert verify(path).ok
    end = header_of(whole)[-2]
    assert path.read_bytes()[FIRST:end] == whole.read_bytes()[FIRST:end]


def test_the_copies_of_damaged_bytes_beside_an_open_stream_are_limited(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(restore_open, "_MOST_KEPT", 3)
    path, peer = copied(whole, tmp_path / "open"), FilePeer(whole)
    kept = []
    with DataStream.open(path, verify="always") as stream:
        for day in range(5):
            # (Of one second, their names do not say which is older.)
            monkeypatch.setattr(time, "strftime", lambda form, n=day: f"2026010{n}T030405")
            with path.open("r+b") as file:
                file.seek(span(1).start + 70_000)
                file.write(b"\xff" * 999)
            result = stream.parts.pages.heal(1, [peer])
            assert result is not None
            kept.append(result.kept)
    assert sorted(map(str, path.parent.glob("*.repair"))) == kept[-3:]
    lines = [it.getMessage() for it in caplog.records if "removed" in it.getMessage()]
    of = "of the copies of damaged bytes the newest 3 are kept"
    assert lines == [f"{path}: removed {name}: {of}" for name in kept[:2]]


def test_a_repair_keeps_all_copies(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(restore_open, "_MOST_KEPT", 1)
    path = copied(whole, tmp_path / "damaged")
    for _ in range(3):
        content = bytearray(path.read_bytes())
        zero(1)(content)
        path.write_bytes(content)
        healed(path, FilePeer(whole))
    assert len([*path.parent.glob("*.repair")]) == 3


def test_an_open_stream_that_grows_meanwhile(whole: Path, tmp_path: Path) -> None:
    path, peer = copied(whole, tmp_path / "open"), FilePeer(whole)
    total = header_of(whole)[-1]
    with DataStream.open(path) as stream:
        with path.open("r+b") as file:
            file.seek(span(3).start + 70_000)
            file.write(b"\xff" * 999)
        answer = peer.entries

        def slow(first: int, stop: int, most: int) -> bytes:
            with stream.atomic_op() as op:
                op.add_entry(1, b"meanwhile")
            return answer(first, stop, most)

        peer.entries = slow  # type: ignore[method-assign]
        result = stream.parts.pages.heal(3, [peer])
        assert result is not None
        assert result.source == peer.name
        assert stream.entry(total).data == b"meanwhile"
    assert verify(path).ok


def test_an_open_stream_that_is_truncated_meanwhile(whole: Path, tmp_path: Path) -> None:
    path, peer = copied(whole, tmp_path / "open"), FilePeer(whole)
    first, _ = bounds(whole, 1)
    with DataStream.open(path) as stream:
        with path.open("r+b") as file:
            file.seek(span(1).start + 70_000)
            file.write(b"\xff" * 999)
        answer = peer.entries

        def slow(start: int, stop: int, most: int) -> bytes:
            stream.truncate(first)
            return answer(start, stop, most)

        peer.entries = slow  # type: ignore[method-assign]
        result = stream.parts.pages.heal(1, [peer])
        assert result is not None
        assert result.source == ""
        assert "meanwhile" in result.why
        assert stream.total_entries == first
    assert verify(path).ok


def test_bookmarks_of_a_page_that_is_restored(whole: Path, tmp_path: Path) -> None:
    path = copied(whole, tmp_path / "open", zero(1))
    shutil.rmtree(path.with_name("s.bin.index"))
    inside = [it for it in scan_file(whole) if it.offset in range(span(1).start, span(1).stop)]
    mark = next(it for it in inside if it.type == 0xB0)
    with DataStream.open(path) as stream:
        stream.bookmarks.wait()
        # Whether it is there is not known.
        for key in (mark.data, b"nowhere"):
            with pytest.raises(DamagedEntry):
                stream.bookmark(key)
        assert stream.bookmark((0).to_bytes(8, "big")) == 0
        assert stream.parts.pages.heal(1, [FilePeer(whole)]) is not None
        assert stream.bookmark(mark.data) == mark.number
        with pytest.raises(UnknownBookmark):
            stream.bookmark(b"nowhere")


@pytest.mark.parametrize("by", ["an operator", "a truncation"])
def test_bookmarks_of_a_page_that_is_no_longer_damaged(
    whole: Path, tmp_path: Path, by: str
) -> None:
    path = copied(whole, tmp_path / "open", zero(1))
    shutil.rmtree(path.with_name("s.bin.index"))
    with DataStream.open(path) as stream:
        stream.bookmarks.wait()
        with pytest.raises(DamagedEntry):
            stream.bookmark(b"nowhere")
        if by == "an operator":
            with path.open("r+b") as file:
                file.seek(span(1).start)
                file.write(whole.read_bytes()[span(1)])
        else:
            stream.truncate(5)
        with pytest.raises(UnknownBookmark):
            stream.bookmark(b"nowhere")
        last = max(it.number for it in scan_file(path) if it.type == 0xB0)
        assert stream.bookmark(last.to_bytes(8, "big")) == last
