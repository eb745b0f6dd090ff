"""Checksums of other copies and states, damaged pages, and servers that lie, by chance.

Nothing good is overwritten, nothing that is known to be damaged is given away, and nothing right is
refused.
"""

from __future__ import annotations

import random
import shutil
from pathlib import Path
from typing import NamedTuple

import pytest

from datastreamer import DataStream
from datastreamer.errors import DamagedEntry
from datastreamer.storage.header.records import get_record
from datastreamer.storage.maintain.check import verify
from datastreamer.storage.maintain.repair import Sources, repair
from datastreamer.storage.pages.restore_open import heal_page
from datastreamer.storage.pages.sidecar import HEADER_SIZE, RECORD_SIZE, RECORDS_OFFSET, SumsHeader
from tests.storage.made import FIRST, PAGE, scan_file
from tests.storage.pages.test_keeping import SIZE, fill, sidecar
from tests.storage.pages.test_restore import FilePeer


class State(NamedTuple):
    """A stream at one moment: the file, its checksums, where the entries of each whole page end,
    the page of each entry, and a copy that a server may serve."""

    content: bytes
    sums: bytes
    ends: list[int]
    pages: list[int]
    copy: Path


@pytest.fixture(scope="module")
def states(tmp_path_factory: pytest.TempPathFactory) -> list[State]:
    """Of two histories of one stream, which have the first page in common."""
    folder = tmp_path_factory.mktemp("attack")
    paths = [folder / "left.bin", folder / "right.bin"]
    found: list[State] = []

    def keep(path: Path) -> None:
        copy = folder / f"{len(found)}.bin"
        shutil.copyfile(path, copy)
        shutil.copyfile(sidecar(path), sidecar(copy))
        ends: dict[int, int] = {}
        pages = []
        for entry in scan_file(copy):
            pages.append((entry.offset - FIRST) // PAGE)
            ends[pages[-1]] = entry.offset + 17 + len(entry.data)
        whole = [ends[page] for page in range(max(ends))]
        found.append(State(copy.read_bytes(), sidecar(copy).read_bytes(), whole, pages, copy))

    with DataStream.create(paths[0], index="memory", sync="os") as stream:
        fill(stream, 1)
    shutil.copyfile(paths[0], paths[1])
    shutil.copyfile(sidecar(paths[0]), sidecar(paths[1]))
    for seed, path in enumerate(paths):
        for pages in (2, 4, 5):
            with DataStream.open(path, index="memory") as stream:
                fill(stream, pages, seed=1000 * seed)
            keep(path)
        with DataStream.open(path, index="memory") as stream:
            stream.update_entry(4, 1, b"new " * (SIZE // 4))
        keep(path)
        with DataStream.open(path, index="memory") as stream:
            stream.truncate(7)
            fill(stream, 3, seed=1000 * seed + 500)
        keep(path)
    return found


class Image:
    """A stream file, perhaps with a damaged page, beside checksums that may be others."""

    def __init__(self, path: Path, states: list[State], chance: random.Random) -> None:
        self.path = path
        self.state = chance.choice(states)
        self._chance = chance
        self._content = bytearray(self.state.content)
        self.damaged = self._damage() if chance.random() < 0.6 else None
        own = chance.random() < 0.5
        sums = self._sums(self.state if own else chance.choice(states))
        path.write_bytes(self._content)
        sidecar(path).write_bytes(sums)
        # A record that is torn is made from its page, unless that is the damaged one.
        self.proves = own and (
            self.damaged is None
            or self._record(sums, self.damaged) == self._record(self.state.sums, self.damaged)
        )

    def _record(self, sums: bytes, page: int) -> bytes:
        return sums[RECORDS_OFFSET + page * RECORD_SIZE :][:RECORD_SIZE]

    def _damage(self) -> int | None:
        """Change bytes of a page; None if its entries and their mark remain."""
        chance, content = self._chance, self._content
        page = chance.randrange(len(self.state.ends))
        start, end, stop = FIRST + page * PAGE, self.state.ends[page], FIRST + (page + 1) * PAGE
        kind = chance.randrange(4)
        if kind == 0:
            content[chance.randrange(start, end)] ^= 1 << chance.randrange(8)
        elif kind == 1:
            at = chance.randrange(start, end - 512)
            content[at : at + 512] = chance.randbytes(512)
        elif kind == 2:
            content[end] ^= 1 << chance.randrange(8)
        else:
            content[end + 1 : stop] = chance.randbytes(stop - end - 1)
            return None
        return page

    def _sums(self, of: State) -> bytes:
        """The checksums of a state; they claim to be of this one. Some are torn or cut off."""
        chance, sums = self._chance, bytearray(of.sums)
        header, record = SumsHeader.unpack(of.sums), get_record(self.state.content[:FIRST])
        assert header is not None
        assert record is not None
        epochs = header._replace(epoch=record.epoch, next_epoch=record.epoch)
        sums[:HEADER_SIZE] = epochs.pack()
        if chance.random() < 0.3:
            at = chance.randrange(RECORDS_OFFSET, len(sums), RECORD_SIZE)
            sums[at + 20 : at + RECORD_SIZE] = bytes(RECORD_SIZE - 20)
        if chance.random() < 0.2:
            del sums[chance.randrange(RECORDS_OFFSET, len(sums)) :]
        return bytes(sums)

    def is_unharmed(self) -> bool:
        """Whether each page has the entries that it had, or the right ones."""
        now = self.path.read_bytes()
        places = [slice(FIRST + at * PAGE, end) for at, end in enumerate(self.state.ends)]
        places.append(slice(FIRST + len(places) * PAGE, len(self._content)))
        right = self.state.content
        return all(
            now[it] == right[it] or now[it] == self._content[it] != right[it] for it in places
        )

    def read(self, *, writer: bool = False) -> None:
        """Read every entry, each page compared with its checksum."""
        how = {} if writer else {"read_only": True}
        with DataStream.open(self.path, index="memory", verify="always", **how) as stream:
            for number, page in enumerate(self.state.pages):
                try:
                    stream.entry(number)
                except DamagedEntry:
                    assert self.damaged is not None, f"page {page} is right"
                    assert page in (self.damaged, self.damaged + 1)
                else:
                    assert page != self.damaged or not self.proves, f"page {page} is damaged"


class Liar(FilePeer):
    """Sends an entry with another byte."""

    def __init__(self, path: Path, chance: random.Random) -> None:
        super().__init__(path)
        self.change(chance.randrange(len(self._packed)))


def peer_of(states: list[State], chance: random.Random) -> FilePeer:
    copy = chance.choice(states).copy
    return FilePeer(copy) if chance.random() < 0.7 else Liar(copy, chance)


def attack(path: Path, states: list[State], seed: int) -> None:
    chance = random.Random(seed)
    image = Image(path, states, chance)
    action = chance.randrange(5)
    if action == 0:
        assert verify(path).ok == (image.damaged is None)
    elif action == 1:
        image.read()
    elif action == 2:
        image.read(writer=True)
    elif action == 3:
        with DataStream.open(path, index="memory", verify="never") as stream:
            writer = stream._ensure_writable()
            while chance.random() < 0.5 and writer.sums_completer.complete_page():
                pass
            for page in range(len(image.state.ends) + 1):
                heal_page(writer.owned, stream.bookmarks, page, [peer_of(states, chance)])
    else:
        done = repair(path, sources=Sources([peer_of(states, chance)]))
        assert image.damaged is not None or not done.plan.healed
    assert image.is_unharmed()


@pytest.mark.parametrize(
    "part", [0, *(pytest.param(part, marks=pytest.mark.soak) for part in range(1, 4))]
)
def test_images(tmp_path: Path, states: list[State], part: int) -> None:
    for seed in range(part * 60, (part + 1) * 60):
        attack_in(tmp_path, states, seed)


@pytest.mark.soak
def test_many_images(tmp_path: Path, states: list[State]) -> None:
    for seed in range(1000, 21_000):
        attack_in(tmp_path, states, seed)


def attack_in(folder: Path, states: list[State], seed: int) -> None:
    image = folder / str(seed)
    image.mkdir()
    try:
        attack(image / "s.bin", states, seed)
    except BaseException as error:
        error.add_note(f"seed {seed}")
        raise
    shutil.rmtree(image)
