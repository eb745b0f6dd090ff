"""What crashes leave, once recovered, is a stream to the reference too."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from tests.interop.peer import GoPeer, beside_reference
from tests.interop.plain import digest, header, scan
from tests.storage.lab.disk import SimDisk
from tests.storage.lab.machine import Laboratory
from tests.storage.made import Item, items

pytestmark = beside_reference
SAMPLE = 12


class Enough(BaseException):
    """Ends the search for examples."""


def recovered_files(folder: Path) -> list[tuple[Path, list[Item]]]:
    """Files as recovery left them after crashes, no two alike; and what we read in them."""
    found: list[tuple[Path, list[Item]]] = []
    seen: set[bytes] = set()

    class Sampling(Laboratory):
        def recovered(self, disk: SimDisk) -> None:
            image = disk.image(self.path)
            content = image.content()
            ends = content[38:54]
            if ends not in seen:
                seen.add(ends)
                path = folder / f"crash{len(found)}.bin"
                path.write_bytes(content)
                found.append((path, items(self.live)))
                if len(found) == SAMPLE:
                    raise Enough

    with suppress(Enough):
        run_state_machine_as_test(
            Sampling,
            settings=settings(
                max_examples=30,  # ten made a dozen different files once
                stateful_step_count=30,
                deadline=None,
                database=None,
                derandomize=True,
                phases=[Phase.generate],
                suppress_health_check=list(HealthCheck),
            ),
        )
    return found


def test_the_reference_reads_what_crashes_left(tmp_path_factory: pytest.TempPathFactory) -> None:
    found = recovered_files(tmp_path_factory.mktemp("crashes"))
    assert len(found) == SAMPLE
    for path, ours in found:
        entries = scan(path)
        assert [(entry.type, entry.data) for entry in entries] == ours
        with GoPeer.serve(path) as server:
            seen = server.get_header()
            assert seen == {name: header(path)[name] for name in seen}
            assert seen["total_entries"] == len(ours)
            assert not server.warnings
            if ours:
                read = GoPeer.read(server.address)
                assert (read["entries"], read["sha256"]) == (len(entries), digest(entries))
