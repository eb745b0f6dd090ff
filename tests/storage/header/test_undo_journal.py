"""Updates in place that a crash interrupts: the next open restores the old bytes."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from datastreamer import DataStream
from datastreamer.errors import CommitInDoubt, DamagedEntry, StreamFileError, WriteFailed
from datastreamer.storage.disk.access import Access
from datastreamer.storage.disk.file_ops import Disk, OsDisk
from datastreamer.storage.header import undo_journal as journal
from datastreamer.storage.header.undo_journal import SUFFIX, Undo
from datastreamer.storage.maintain.check import verify
from datastreamer.storage.maintain.repair import repair
from datastreamer.storage.maintain.snapshot import snapshot
from datastreamer.storage.write.undo_after_crash import undo_update
from tests.storage.made import FaultyDisk, add, copied, items

OLD, NEW = b"o" * 2000, b"n" * 2000


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "s.bin"


class KeepingDisk(FaultyDisk):
    """Copies the stream and its journal before and after each sync."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path
        self.kept: list[Path] = []

    def keep(self) -> None:
        name = f"kept{len(self.kept)}.bin"
        self.kept.append(copied(self.path, name))
        undo = Path(f"{self.path}{SUFFIX}")
        if undo.exists():
            Path(f"{self.kept[-1]}{SUFFIX}").write_bytes(undo.read_bytes())


def updated(path: Path) -> KeepingDisk:
    disk = KeepingDisk(path)
    with DataStream.create(path, index="memory", disk=disk) as stream:
        add(stream, [(1, b"before"), (2, OLD), (3, b"after")])
        disk.before["sync"] = disk.keep
        stream.update_entry(1, 2, NEW)
        assert items(stream)[1] == (2, NEW)
    assert not Path(f"{path}{SUFFIX}").exists()
    return disk


def test_a_crash_at_each_sync_leaves_the_old_or_the_new(path: Path) -> None:
    disk = updated(path)
    seen = set()
    for kept in disk.kept:
        with DataStream.open(kept, index="memory") as stream:
            found = items(stream)
            seen.add(found[1][1])
            assert found == [(1, b"before"), (2, found[1][1]), (3, b"after")]
        assert not Path(f"{kept}{SUFFIX}").exists()
        with DataStream.open(kept, index="memory") as stream:
            assert items(stream) == found
    assert seen == {OLD, NEW}


def half_done(path: Path) -> Path:
    """The journal is on disk; one sector of the entry has the old bytes."""
    disk = updated(path)
    [kept, *_] = [one for one in disk.kept if Path(f"{one}{SUFFIX}").exists()]
    start = kept.read_bytes().index(NEW)
    sector = (start // 512 + 2) * 512
    with open(kept, "r+b") as file:
        file.seek(sector)
        file.write(OLD[:512])
    return kept


def test_half_an_update_is_undone(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    kept = half_done(path)
    with pytest.raises(DamagedEntry, match="open the stream for writing once"):
        DataStream.open(kept, read_only=True)
    with DataStream.open(kept, index="memory") as stream:
        assert items(stream)[1] == (2, OLD)
        assert "a crash interrupted an update" in caplog.text
        assert stream.epoch >= 2  # a follower may have seen the new bytes
    with DataStream.open(kept, read_only=True) as stream:
        assert items(stream)[1] == (2, OLD)


def test_an_update_by_a_symbolic_link_is_undone_by_any_name(path: Path) -> None:
    folder = path.with_name("links")
    folder.mkdir()
    link = folder / "current.bin"
    link.symlink_to(path)
    disk = KeepingDisk(path)
    with DataStream.create(path, index="memory") as stream:
        add(stream, [(1, b"before"), (2, OLD)])
    with DataStream.open(link, index="memory", disk=disk) as stream:
        disk.before["sync"] = disk.keep
        stream.update_entry(1, 2, NEW)
    [kept, *_] = [one for one in disk.kept if Path(f"{one}{SUFFIX}").exists()]
    start = kept.read_bytes().index(NEW)
    with open(kept, "r+b") as file:
        file.seek(start + 700)
        file.write(OLD[:512])
    other = folder / "other.bin"
    other.symlink_to(kept)
    with pytest.raises(DamagedEntry, match="open the stream for writing once"):
        DataStream.open(other, read_only=True)
    with pytest.raises(DamagedEntry, match="open the stream for writing once"):
        snapshot(other, folder / "out.bin")
    assert "half of an update" in verify(other).problems[0].what
    with DataStream.open(other, index="memory") as stream:
        assert items(stream)[1] == (2, OLD)
    assert not Path(f"{kept}{SUFFIX}").exists()


def test_a_recovery_that_ends_after_the_journal_is_removed(path: Path) -> None:
    """Without the journal only the old mark shows that the update was undone: a follower that has
    read the new bytes still notices."""
    disk = updated(path)
    [*_, kept, _] = [one for one in disk.kept if Path(f"{one}{SUFFIX}").exists()]
    with DataStream.open(kept, follow=True, index="memory") as reader:
        assert items(reader)[1] == (2, NEW)
        seen = reader.epoch
        file = OsDisk().open(str(kept), write=True)
        assert undo_update(OsDisk(), file, str(kept), str(kept))
        file.close()
        assert not Path(f"{kept}{SUFFIX}").exists()
        with DataStream.open(kept, index="memory") as stream:
            assert items(stream)[1] == (2, OLD)
            reader.refresh()
            assert reader.epoch > seen
            assert items(reader)[1] == (2, OLD)


def test_an_update_whose_journal_was_not_removed(path: Path) -> None:
    disk = updated(path)
    [*_, kept] = [one for one in disk.kept if Path(f"{one}{SUFFIX}").exists()]
    with DataStream.open(kept, read_only=True) as reader:
        seen = reader.epoch
    with DataStream.open(kept, index="memory") as stream:
        assert (items(stream)[1], stream.epoch) == ((2, NEW), seen)
    assert not Path(f"{kept}{SUFFIX}").exists()


def test_a_journal_that_does_not_match_is_set_aside(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    kept = half_done(path)
    with DataStream.open(path, index="memory") as stream:
        before = items(stream)
    # Bytes that are neither the old nor the new ones.
    content = kept.read_bytes()
    Path(f"{path}{SUFFIX}").write_bytes(Path(f"{kept}{SUFFIX}").read_bytes())
    at = path.read_bytes().index(NEW)
    with open(path, "r+b") as file:
        file.seek(at + 700)
        file.write(b"other")
    with DataStream.open(path, index="memory") as stream:
        assert stream.entry(0).data == before[0][1]
        assert b"other" in stream.entry(1).data
    assert "does not match the file" in caplog.text
    [aside] = path.parent.glob(f"s.bin{SUFFIX}.*.unused")
    assert content
    assert Undo.unpack(aside.read_bytes()) is not None


@pytest.mark.parametrize("cut", [0, 5, 100, -1])
def test_a_journal_that_is_not_whole_is_set_aside(
    path: Path, cut: int, caplog: pytest.LogCaptureFixture
) -> None:
    kept = half_done(path)
    with DataStream.open(path, index="memory") as stream:
        before = items(stream)
    torn = Path(f"{kept}{SUFFIX}").read_bytes()[:cut]
    Path(f"{path}{SUFFIX}").write_bytes(torn)
    [problem] = verify(path).problems
    assert "keeps the journal" in problem.repair
    with DataStream.open(path, index="memory") as stream:
        assert items(stream) == before
    assert "is kept as" in caplog.text
    assert not Path(f"{path}{SUFFIX}").exists()
    [aside] = path.parent.glob(f"s.bin{SUFFIX}.*.unused")
    assert aside.read_bytes() == torn
    assert verify(path).ok


def without_journal(kept: Path, how: str) -> None:
    name = Path(f"{kept}{SUFFIX}")
    content = bytearray(name.read_bytes())
    if how == "removed":
        name.unlink()
    elif how == "damaged":
        content[200] ^= 1
        name.write_bytes(content)
    else:
        undo = Undo.unpack(bytes(content))
        assert undo is not None
        name.write_bytes(undo._replace(stream_id=bytes(16)).pack())


@pytest.mark.parametrize("how", ["removed", "damaged", "of another stream"])
def test_half_an_update_with_an_unusable_journal(path: Path, how: str) -> None:
    """It is unknown which bytes are old: every open names the entry and refuses the file."""
    kept = half_done(path)
    without_journal(kept, how)
    before = kept.read_bytes()
    for _ in range(2):
        with pytest.raises(DamagedEntry, match=r"update of entry 1, .*`datastreamer repair`"):
            DataStream.open(kept, index="memory")
        with pytest.raises(DamagedEntry, match=r"update of entry 1, "):
            DataStream.open(kept, read_only=True)
    assert kept.read_bytes() == before
    assert Path(f"{kept}{SUFFIX}").exists() == (how != "removed")
    [problem] = verify(kept).problems
    assert problem.where == "entry 1"
    assert problem.repair == "restore the journal, or repair keeps the entry as it is"
    done = repair(kept)
    assert any("keep entry 1 as it is" in step for step in done.plan.steps)
    with DataStream.open(kept, index="memory") as stream:
        assert items(stream)[1][1] not in (OLD, NEW)
    assert not Path(f"{kept}{SUFFIX}").exists()
    assert verify(kept).ok


def test_a_journal_that_is_put_back(path: Path) -> None:
    kept = half_done(path)
    name, elsewhere = Path(f"{kept}{SUFFIX}"), path.with_name("elsewhere")
    name.rename(elsewhere)
    with pytest.raises(DamagedEntry, match="restore it"):
        DataStream.open(kept, index="memory")
    elsewhere.rename(name)
    with DataStream.open(kept, index="memory") as stream:
        assert items(stream)[1] == (2, OLD)


def test_the_mark_is_on_disk_before_the_journal_is_removed(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise a power cut leaves a page that requires the removed journal."""
    disk = FaultyDisk()
    steps: list[str] = []
    with DataStream.create(path, index="memory", disk=disk) as stream:
        add(stream, [(1, OLD)])
        remove = journal.remove

        def removed(disk: Disk, place: str, undo: Undo, beside: Access) -> None:
            steps.append("removed")
            remove(disk, place, undo, beside)

        monkeypatch.setattr(journal, "remove", removed)
        disk.before["write"] = lambda: steps.append("write")
        disk.before["sync"] = lambda: steps.append("sync")
        stream.update_entry(0, 1, NEW)
        disk.before.clear()
    assert steps[steps.index("removed") - 1] == "sync"


@pytest.mark.parametrize("kind", ["folder", "pipe"])
def test_what_cannot_be_a_journal(path: Path, kind: str) -> None:
    DataStream.create(path, index="memory").close()
    name = Path(f"{path}{SUFFIX}")
    if kind == "folder":
        name.mkdir()
    else:
        os.mkfifo(name)
    for read_only in (False, True):
        with pytest.raises(StreamFileError, match=f"undo: a {kind} .* move it elsewhere"):
            DataStream.open(path, index="memory", read_only=read_only)
    with pytest.raises(StreamFileError, match="move it elsewhere"):
        verify(path)


def test_no_space_for_the_journal(path: Path) -> None:
    disk = FaultyDisk()
    with DataStream.create(path, index="memory", disk=disk) as stream:
        add(stream, [(1, OLD)])
        real = disk.create

        def full(name: str, beside: object) -> object:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        disk.create = full  # type: ignore[method-assign, assignment]
        with pytest.raises(WriteFailed, match="No space left"):
            stream.update_entry(0, 1, NEW)
        disk.create = real  # type: ignore[method-assign]
        assert items(stream) == [(1, OLD)]
        stream.update_entry(0, 1, NEW)
        assert items(stream) == [(1, NEW)]


def test_an_update_that_the_disk_refuses_in_the_middle(path: Path) -> None:
    disk = FaultyDisk()
    stream = DataStream.create(path, index="memory", disk=disk)
    add(stream, [(1, OLD)])
    file = stream._file.file
    real = file.write

    def refuse(data: bytes, offset: int) -> None:
        if bytes(data) == NEW:
            real(data[:1000], offset)
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        real(data, offset)

    file.write = refuse  # type: ignore[method-assign, assignment]
    with pytest.raises(CommitInDoubt, match="open the stream again"):
        stream.update_entry(0, 1, NEW)
    with pytest.raises(CommitInDoubt, match="open the stream again"):
        stream.close()
    with DataStream.open(path, index="memory") as stream:
        assert items(stream) == [(1, OLD)]


def test_half_an_update_after_which_another_program_wrote(path: Path) -> None:
    """The records do not match its header; the journal still identifies the bytes."""
    kept = half_done(path)
    with open(kept, "r+b") as file:
        file.seek(64)
        file.write(bytes(136))
    with pytest.raises(DamagedEntry, match="a crash interrupted the update of an entry"):
        DataStream.open(kept, read_only=True)
    assert "half of an update" in verify(kept).problems[-1].what


def test_an_unrelated_journal_does_not_disturb(path: Path) -> None:
    """Neither a snapshot beside the writer, nor the writer's own update."""
    with DataStream.create(path, index="memory") as stream:
        add(stream, [(1, OLD)])
        Path(f"{path}{SUFFIX}").write_bytes(b"nothing")
        assert snapshot(path, path.with_name("copy.bin")).header.total_entries == 1
        stream.update_entry(0, 1, NEW)
        add(stream, [(1, OLD)])
        assert items(stream) == [(1, NEW), (1, OLD)]
    assert not Path(f"{path}{SUFFIX}").exists()
    assert [it.read_bytes() for it in path.parent.glob("*.unused")] == [b"nothing"]
