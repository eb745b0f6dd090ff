"""Network file systems, detected by generated mount tables."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from datastreamer import DataStream
from datastreamer.errors import IndexFailed, StreamFileError
from datastreamer.storage.disk import mounts
from datastreamer.storage.disk.mounts import Mount, is_network, mounts_of, on_network, type_of

TABLE = """\
21 1 254:0 / / rw,relatime shared:1 - ext4 /dev/vda rw
22 21 0:20 / /proc rw,nosuid - proc proc rw
30 21 0:41 / /data rw,relatime shared:7 master:2 - nfs4 server:/export rw,vers=4.2
31 30 254:1 /inner /data/fast rw - xfs /dev/vdb rw
32 21 0:50 / /with\\040space\\134n rw - cifs //server/share rw
33 21 0:51 / /home/me/remote rw - fuse.sshfs me@server: rw
34 21 8:17 / /media/stick rw - fuseblk /dev/sdb1 rw
35 21 0:60 / /over rw - nfs server:/over rw
36 35 0:61 / /over rw - tmpfs tmpfs rw

this is no line of it
37 21 what / /nothing rw - nfs server:/nothing rw
38 21 0:70 / /broken rw
"""


def test_lines() -> None:
    found = mounts_of(TABLE)
    assert found[0] == Mount((254, 0), "/", "ext4")
    assert found[4] == Mount((0, 50), "/with space\\n", "cifs")
    assert len(found) == 9
    assert mounts_of("") == []


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/", "ext4"),
        ("/srv/s.bin", "ext4"),
        ("/database/s.bin", "ext4"),
        ("/data", "nfs4"),
        ("/data/s.bin", "nfs4"),
        ("/data/faster/s.bin", "nfs4"),
        ("/data/fast/deep/s.bin", "xfs"),
        ("/with space\\n/s.bin", "cifs"),
        ("/home/me/remote/s.bin", "fuse.sshfs"),
        ("/over/s.bin", "tmpfs"),
    ],
)
def test_the_mount_that_holds_a_path(path: str, kind: str) -> None:
    assert type_of(path, mounts_of(TABLE)) == kind


def test_the_device_decides() -> None:
    """A mount may be hidden behind one further up that was made later."""
    assert type_of("/data/fast/s.bin", mounts_of(TABLE), (0, 41)) == "nfs4"
    assert type_of("/over/s.bin", mounts_of(TABLE), (0, 60)) == "nfs"
    assert type_of("/over/s.bin", mounts_of(TABLE), (9, 9)) == "tmpfs"


def test_no_mount() -> None:
    assert type_of("/s.bin", mounts_of(TABLE)[1:]) is None


@pytest.mark.parametrize(
    "kind",
    ["nfs", "nfs4", "cifs", "smb3", "9p", "ceph", "lustre", "fuse.sshfs", "fuse", "virtiofs"],
)
def test_network(kind: str) -> None:
    assert is_network(kind)


@pytest.mark.parametrize("kind", ["ext4", "xfs", "btrfs", "tmpfs", "overlay", "zfs", "fuseblk"])
def test_local(kind: str) -> None:
    assert not is_network(kind)


@pytest.fixture
def table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A mount table that names the file system of the test's folder."""
    device = os.stat(tmp_path).st_dev
    where = f"{os.major(device)}:{os.minor(device)}"
    table = tmp_path / "mountinfo"
    table.write_text(f"1 0 {where} / / rw - ext4 x rw\n2 1 {where} / {tmp_path}/n rw - nfs4 y rw\n")
    (tmp_path / "n").mkdir()
    monkeypatch.setattr(mounts, "_MOUNTS", str(table))
    return table


def test_a_path(table: Path) -> None:
    folder = table.parent
    (folder / "link").symlink_to(folder / "n")
    assert on_network(folder) is None
    assert on_network(folder / "s.bin") is None
    assert on_network(folder / "n") == "nfs4"
    assert on_network(str(folder / "n" / "not" / "there" / "s.bin")) == "nfs4"
    assert on_network(folder / "link" / "s.bin") == "nfs4"


def test_it_is_not_known(table: Path) -> None:
    table.unlink()
    assert on_network(table.parent / "n") is None


@pytest.mark.skipif(sys.platform != "linux", reason="the mount table is Linux's")
def test_the_real_table() -> None:
    assert type_of("/", mounts_of(Path("/proc/self/mountinfo").read_text())) is not None
    assert on_network("/proc/self") is None


def test_what_is_refused_there(
    tmp_path: Path, table: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "s.bin"
    with DataStream.create(path) as stream, stream.atomic_op() as op:
        op.add_bookmark(b"k")
        op.add_entry(1, b"event")
    table.write_text(f"36 35 0:99 / {tmp_path} rw - nfs4 server:/x rw\n")
    monkeypatch.setattr(mounts, "on_network", lambda path: "nfs4")
    with pytest.raises(StreamFileError, match=r"nfs4.*following is not safe.*ALLOW_NETWORK=1"):
        DataStream.open(path, follow=True)
    with pytest.raises(IndexFailed, match=r"LMDB is not safe.*index='memory'"):
        DataStream.open(path)
    with DataStream.open(path, index="memory") as stream:
        assert stream.bookmark(b"k") == 0
    with DataStream.open(path, read_only=True) as stream:
        # Read unchanged, with what the stream itself says of bookmarks.
        assert stream.bookmark(b"k") == 0
    monkeypatch.setenv(mounts.ALLOW, "1")
    with DataStream.open(path, follow=True) as stream:
        assert stream.bookmark(b"k") == 0
    with DataStream.open(path) as stream:
        assert stream.bookmark(b"k") == 0
