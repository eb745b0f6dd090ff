"""Streams to read, a server of one, and the commands inside this process."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from datastreamer.archive.archived_file import ArchivedFile
from datastreamer.archive.writer import ArchiveWriter
from datastreamer.cli import dsapp, main
from datastreamer.cli.demo import SYSTEM_ID, DemoSequencer
from datastreamer.service.embedded import StreamServer
from datastreamer.storage.objects.store import Store
from datastreamer.storage.stream import DataStream

BLOCKS = 40
ENTRIES = 5 * BLOCKS


@pytest.fixture(autouse=True)
def no_settings(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Contexts and servers seen before are not those of who runs the tests."""
    for name in ("XDG_CONFIG_HOME", "XDG_STATE_HOME"):
        monkeypatch.setenv(name, str(tmp_path_factory.getbasetemp()))
    monkeypatch.delenv("DATASTREAMER_SERVER", raising=False)


class Outcome(NamedTuple):
    """How a command ended and what it wrote."""

    code: int
    out: bytes
    err: str

    @property
    def lines(self) -> list[str]:
        return self.out.decode().splitlines()

    @property
    def objects(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.lines]

    def failed(self, code: int = 1) -> str:
        """The error line; wrong usage may have a second line."""
        assert self.code == code, self
        first, *more = self.err.splitlines()
        assert first.startswith("error: "), self
        assert len(more) == (1 if code == 2 else 0), self
        return first.removeprefix("error: ")


Invoke = Callable[..., Outcome]


@pytest.fixture
def invoke(capsysbinary: pytest.CaptureFixture[bytes]) -> Invoke:
    """``invoke("cat", path, "--count", 3)`` runs the command here."""

    def run(*words: object, program: Any = main.main) -> Outcome:
        code = program([str(word) for word in words])
        out, err = capsysbinary.readouterr()
        return Outcome(code, out, err.decode())

    return run


@pytest.fixture
def invoke_dsapp(invoke: Invoke) -> Invoke:
    def run(*words: object) -> Outcome:
        return invoke(*words, program=dsapp.main)

    return run


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A stream of 40 demo blocks; tests must not write to it."""
    path = tmp_path_factory.mktemp("made") / "made.bin"
    with DataStream.create(path, system_id=SYSTEM_ID, sync="os") as stream:
        sequencer = DemoSequencer(stream)
        for _ in range(BLOCKS):
            sequencer.write()
    return path


@pytest.fixture
def copy(made: Path, tmp_path: Path) -> Path:
    """A copy that a test may write to."""
    return Path(shutil.copyfile(made, tmp_path / "copy.bin"))


@pytest.fixture(scope="module")
def server(made: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """HOST:PORT of a server of the demo stream."""
    path = shutil.copyfile(made, tmp_path_factory.mktemp("served") / "served.bin")
    with StreamServer(path, host="127.0.0.1", port=0, in_process=True) as serving:
        yield f"127.0.0.1:{serving.port}"


@pytest.fixture(scope="module")
def archive(made: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """An archive of the demo stream."""
    return archived(made, tmp_path_factory.mktemp("archive"))


def archived(path: Path, folder: Path) -> str:
    """The SOURCE that a stream file is pushed to, a folder."""
    with closing(ArchivedFile(path)) as source:
        ArchiveWriter(source, Store(folder.as_uri())).publish()
    return f"archive:{folder.as_uri()}"


@pytest.fixture(params=["file", "server", "archive"])
def source(request: pytest.FixtureRequest, made: Path) -> str:
    """The demo stream, as a file, from a server and from an archive."""
    return str(made) if request.param == "file" else str(request.getfixturevalue(request.param))
