"""The containers' commands, run as they stand there but for folders, hosts and ports."""

from __future__ import annotations

import json
import re
import signal
from contextlib import ExitStack
from pathlib import Path

from datastreamer.net.blocking import BlockingClient
from tests.cli.process import Running, running

DOCKER = Path(__file__).resolve().parent.parent / "contrib" / "docker"


def commands() -> list[list[str]]:
    text = (DOCKER / "compose.yaml").read_text()
    return [
        json.loads(found) for found in re.findall(r"^    command: (\[.*\])$", text, re.MULTILINE)
    ]


def taken(relay: Running, port: int) -> list[int]:
    with BlockingClient("127.0.0.1", port) as client:
        return [entry.number for entry in client.entries(stop=20)]


def test_the_commands_of_the_compose_file(tmp_path: Path) -> None:
    sequencer, first, second = commands()
    config = (DOCKER / "relay.toml").read_text()

    def here(words: list[str], **ports: int) -> list[str]:
        text = json.dumps(words)
        for folder in ("/data", "/etc"):
            text = text.replace(folder, str(tmp_path))
        for name, port in ports.items():
            text = re.sub(f"{name.replace('_', '-')}:[0-9]+", f"127.0.0.1:{port}", text)
        changed: list[str] = json.loads(text)
        return changed

    with ExitStack() as stack:
        words = [word if word != "6900" else "0" for word in here(sequencer)]
        serving = stack.enter_context(
            running(*words, module="datastreamer.cli.dsapp", cwd=tmp_path)
        )
        port = serving.port()
        words = [*here(first, sequencer=port), "--port", "0"]
        one = stack.enter_context(running(*words, cwd=tmp_path))
        first_port = one.port()
        assert taken(one, first_port) == list(range(20))
        (text,) = here([config], sequencer=port, relay_1=first_port)
        (tmp_path / "relay.toml").write_text(text.replace("relay.bin", "second.bin"))
        two = stack.enter_context(running(*here(second), "--port", "0", cwd=tmp_path))
        assert taken(two, two.port()) == list(range(20))
        for process in (two, one):
            process.signal(signal.SIGTERM)
            assert process.wait() == 0
