"""The showcase: a sequencer writes, a server serves, three clients follow.

Owns the script of the play. What is seen of it is `scene`'s, the clients are
`audience`'s.
"""

from __future__ import annotations

import hashlib
import tempfile
import time
from pathlib import Path
from typing import Annotated

import typer

from datastreamer.cli.demo.sequencer import ENTRIES_PER_OPERATION, SYSTEM_ID, VERSION, Sequencer
from datastreamer.cli.shared.exit_codes import Failure
from datastreamer.cli.shared.options import number_parser
from datastreamer.cli.shared.signals import Ending, asked_to_end
from datastreamer.cli.showcase.audience import Commit, Watcher
from datastreamer.cli.showcase.scene import Scene, new_scene, print_result
from datastreamer.service.embedded import StreamServer
from datastreamer.storage.stream import DataStream

_HOST = "127.0.0.1"
_PATIENCE = 20.0
_JOINING = (0.0, 0.25, 0.5)
_number = number_parser(1_000_000)

SecondsOption = Annotated[
    int, typer.Option("--seconds", parser=_number, help="How long blocks are written.")
]
RateOption = Annotated[int, typer.Option("--rate", parser=_number, help="Blocks a second.")]
HistoryOption = Annotated[
    int, typer.Option("--history", parser=_number, help="Blocks that are there before.")
]


def showcase(
    seconds: SecondsOption = 12, rate: RateOption = 50, history: HistoryOption = 40_000
) -> None:
    """See a stream server work: a sequencer writes, a server serves, three clients follow."""
    blocks = max(1, seconds) * max(1, rate)
    stop = (history + blocks) * ENTRIES_PER_OPERATION
    clients = [
        Watcher(f"client {place}", part * seconds) for place, part in enumerate(_JOINING, start=1)
    ]
    with (
        asked_to_end() as ending,
        tempfile.TemporaryDirectory(prefix="datastreamer-") as folder,
        StreamServer(
            Path(folder) / "showcase.bin", host=_HOST, port=0, version=VERSION, system_id=SYSTEM_ID
        ) as server,
    ):
        sequencer = Sequencer(server.stream)
        with server.stream.atomic_op():
            for _ in range(history):
                sequencer.add()
        try:
            with new_scene(server.stream, sequencer, clients, blocks, rate) as scene:
                commits = _write(server, sequencer, clients, blocks, rate, stop, scene, ending)
                for client in clients:
                    client.finish(_PATIENCE)
                    scene.show()
        finally:
            for client in clients:
                client.leave()
        written = _digest(server.stream)
        print_result(server.stream.total_entries, written, clients, commits)
    differ = [client.name for client in clients if client.report["digest"] != written]
    if differ:
        raise Failure(f"{' and '.join(differ)} did not receive what was written")


def _write(
    server: StreamServer,
    sequencer: Sequencer,
    clients: list[Watcher],
    blocks: int,
    rate: int,
    stop: int,
    scene: Scene,
    ending: Ending,
) -> list[Commit]:
    """Write the live blocks, an operation each, while the clients join one by one."""
    commits: list[Commit] = []
    began = time.monotonic()
    for written in range(blocks):
        due = began + written / rate
        if ending.wait(max(0.0, due - time.monotonic())):
            raise Failure("ended before its end")
        for client in clients:
            if client.state == "waiting" and time.monotonic() - began >= client.joins:
                client.join(_HOST, server.port, stop)
        server.stream.start_atomic_op()
        sequencer.add()
        called = time.monotonic_ns()
        server.stream.commit_atomic_op()
        commits.append(Commit(called, time.monotonic_ns(), server.stream.total_entries - 1))
        scene.show()
    return commits


def _digest(stream: DataStream) -> str:
    """The digest of what stands in the file."""
    digest = hashlib.sha256()
    for batch in stream.batches():
        digest.update(batch.packed())
    return digest.hexdigest()
