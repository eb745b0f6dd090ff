"""Real processes on the real disk, of which the C library refuses, cuts short or forgets calls."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from datastreamer import DataStream
from tests.storage.faults.shim import EVERY, Driven, Failed, FaultPlan, build, run, why_not
from tests.storage.made import sides

pytestmark = pytest.mark.skipif(bool(why_not()), reason=why_not())


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("shim"))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "s.bin"


@pytest.fixture
def plan(library: Path, path: Path, tmp_path: Path) -> FaultPlan:
    return FaultPlan(library, str(path), tmp_path / "plan")


def held(path: Path) -> list[str]:
    with DataStream.open(path) as stream:
        return [entry.data.decode() for entry in stream.entries()]


def doubtful(driven: Driven, name: str, *arguments: object) -> str:
    with pytest.raises(Failed) as caught:
        driven.do(name, *arguments)
    assert caught.value.name == "CommitInDoubt"
    assert "\n" not in caught.value.text
    return caught.value.text


def test_a_commit(path: Path, plan: FaultPlan) -> None:
    """A short write continues; a refused one can be made again, on a disk that works."""
    with Driven(plan) as driven:
        driven.do("create", str(path), "commit")
        plan.fail("write", count=3, action="short")
        driven.commit("one", "two")
        for call, number in (("write", errno.ENOSPC), ("write", errno.EIO), ("sync", errno.EIO)):
            plan.fail(call, action=number)
            driven.do("add", call)
            with pytest.raises(Failed) as caught:
                driven.do("commit")
            assert caught.value.name == "WriteFailed"
            assert driven.do("items")[-1] != call
            driven.do("roll back")
        driven.commit("three")
        driven.kill()
    assert held(path) == ["one", "two", "three"]


@pytest.mark.parametrize("settled", [True, False])
def test_a_rollback(path: Path, plan: FaultPlan, settled: bool) -> None:
    """One that returned is a rollback, also if the process is killed after it."""
    with Driven(plan) as driven:
        driven.do("create", str(path), "commit")
        driven.commit("one")
        plan.fail("sync", count=EVERY)
        driven.do("add", "never")
        assert "whether the operation from entry 1 on" in doubtful(driven, "commit")
        if settled:
            plan.lift()
            driven.do("roll back")
        else:
            assert "whether the operation from entry 1 on" in doubtful(driven, "roll back")
        driven.kill()
    assert held(path) in [["one"], *([] if settled else [["one", "never"]])]


@pytest.mark.parametrize("call", ["sync", "write"])
def test_a_close(path: Path, plan: FaultPlan, call: str) -> None:
    with Driven(plan) as driven:
        driven.do("create", str(path), "os")
        driven.commit("one")
        driven.do("sync")
        driven.commit("two", "three")
        plan.fail("sync", count=EVERY)
        doubtful(driven, "sync")
        plan.fail(call, count=EVERY)
        assert "entries 1 to 2 may not be on disk; the stream is closed" in doubtful(
            driven, "close"
        )
        driven.do("close")
        plan.lift()
        driven.do("open", str(path), "commit")
        assert driven.do("items") == ["one", "two", "three"]
        driven.do("close")
    assert held(path) == ["one", "two", "three"]
    assert sides(path) == []


@pytest.mark.parametrize("call", ["write", "sync"])
@pytest.mark.parametrize("skip", range(6))
def test_a_change(path: Path, plan: FaultPlan, call: str, skip: int) -> None:
    """A truncation or an update is made, or not, at whatever step the disk refuses."""
    for change in (["truncate", 1], ["update", 1, "TWO"]):
        path.unlink(missing_ok=True)
        with Driven(plan) as driven:
            driven.do("create", str(path), "commit")
            driven.commit("one", "two", "three")
            before = driven.do("items")
            plan.fail(call, skip=skip)
            came = "done"
            try:
                driven.do(*change)
            except Failed as error:
                came = error.name
            allowed = {
                "done": [changed(change)],
                "WriteFailed": [before],
                "CommitInDoubt": [before, changed(change)],
            }[came]
            plan.lift()
            driven.kill()
        assert held(path) in allowed


def changed(change: list[object]) -> list[str]:
    return ["one"] if change[0] == "truncate" else ["one", "TWO", "three"]


def test_a_snapshot(path: Path, plan: FaultPlan, library: Path, tmp_path: Path) -> None:
    of_copies = FaultPlan(library, str(tmp_path / "copy.bin*"), tmp_path / "plan")
    with Driven(of_copies) as driven:
        driven.do("create", str(path), "commit")
        driven.commit("one")
        for call in ("sync", "write", "truncate"):
            of_copies.fail(call)
            with pytest.raises(Failed) as caught:
                driven.do("snapshot", str(tmp_path / "copy.bin"))
            assert caught.value.name == "WriteFailed"
            assert list(tmp_path.glob("copy.bin*")) == []
        of_copies.lift()
        assert driven.do("snapshot", str(tmp_path / "copy.bin")) == 1
    assert held(tmp_path / "copy.bin") == ["one"]


@pytest.mark.parametrize("lost", [0, 2, 4])
def test_writes_that_are_lost_while_the_kernel_runs_on(
    path: Path, plan: FaultPlan, lost: int
) -> None:
    """The data of an operation is dropped, its header is there: cut off like behind a power cut,
    and no reader is shown it. (A commit under "os" is a write of its data, then one of header and
    mark.)"""
    with Driven(plan) as driven:
        driven.do("create", str(path), "os")
        driven.commit("one")
        driven.do("sync")
        plan.fail("write", skip=lost, action="drop")
        driven.commit("two")
        driven.commit("three")
        driven.commit("four")
        driven.kill()
    with DataStream.open(path, read_only=True) as reader:
        assert [entry.data for entry in reader.entries()] == [b"one"]
    assert held(path) == ["one"]
    assert len(sides(path)) == 1


def test_append(path: Path, plan: FaultPlan) -> None:
    """One line for the operation, one for the close that cannot settle it; never a traceback."""
    with DataStream.create(path, index="memory") as stream, stream.atomic_op() as op:
        op.add_entry(1, b"one")
    # The open syncs twice.
    plan.fail("sync", skip=2, count=EVERY)
    lines = '{"type": 1, "data": "0x01"}\n{"commit": true}\n'
    done = run(plan, ["append", str(path)], lines)
    assert done.returncode == 1
    first, second = [it for it in done.stderr.splitlines() if it.startswith("error: ")]
    assert first.startswith(f"error: line 2: {path}: the system refused to write: Input/output")
    assert "whether the operation from entry 1 on is on disk is not known; the stream" in second
    assert "Traceback" not in done.stderr
    plan.lift()
    assert held(path)[0] == "one"
