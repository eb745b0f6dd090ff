"""The checkpoint of a query, as a driver leaves it that was killed."""

from __future__ import annotations

from pathlib import Path


def forget_commit(checkpoint: Path) -> None:
    """Remove the last commit: the driver was killed before it was on disk."""
    commits = [it for it in (checkpoint / "commits").iterdir() if it.name.isdigit()]
    if commits:
        last = max(commits, key=lambda it: int(it.name))
        last.unlink()
        last.with_name(f".{last.name}.crc").unlink(missing_ok=True)
